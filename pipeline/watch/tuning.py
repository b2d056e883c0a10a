"""The constants of the watch, each with its unit. Nothing of a fleet's data is in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of both layers."""

    silent_s: float = 5.0
    """Age of the last heartbeat from which on a worker is silent."""
    common_share: float = 0.3
    """Share of a role above which an oddity is common, and no worker is blamed."""
