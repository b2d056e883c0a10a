"""Announcements of weights: published versions, and the workers that serve them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class WeightsAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """A published policy version, or the base weights below an adapter."""

    policy_version: int
    """BASE_VERSION for base weights."""
    digest: str
    """xxh3-128 of all bytes of the file, as ``xxh3-128:hex``."""
    path: str
    """A safetensors file on the learner's host."""
    num_bytes: int
    host: str
    """Host of ``path``: its generators map the file, others request it at ``endpoint``."""
    endpoint: str = ""
    """Where the learner serves ranges of the file over ZeroMQ; or empty."""
    base: WeightsAnnouncement | None = None
    """The weights that the file, an adapter, is added to. None: the file is the whole version."""
    part_bytes: int = 0
    """Size of all parts but the last; 0 where no other host fetches the file."""
    parts_digest: str = ""
    """Of the digests of all parts, in their order (``pipeline.weights.digest``); or empty."""


class RelayAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves the versions that its host has."""

    worker: str
    endpoint: str
    public_key: str = ""


class RelayPlace(NamedTuple):
    """A relay's place in the order in which relays came. Places below only change when one goes."""

    position: int
    """From 0."""
    num_relays: int
    """In all, this one included."""
