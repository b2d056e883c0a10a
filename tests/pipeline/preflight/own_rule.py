"""A rule of one's own, DAPO by another name."""

from __future__ import annotations

from pipeline.algorithms.dapo import Dapo


class OwnDapo(Dapo):
    __slots__ = ()
