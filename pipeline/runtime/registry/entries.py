"""Parts of registry entries: announcements of weights and relays, vitals, names of counters."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from pipeline.process.work import ServiceSums


class WeightsAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """A published policy version, or the base weights of an adapter."""

    policy_version: int
    """BASE_VERSION for base weights."""
    digest: str
    """xxh3-128 of the whole file, as ``xxh3-128:hex``."""
    path: str
    """A safetensors file on the learner's host."""
    num_bytes: int
    host: str
    """The host of ``path``: generators there map the file, others request it at ``endpoint``."""
    endpoint: str = ""
    """Where the learner serves ranges of the file over ZeroMQ; may be empty."""
    base: WeightsAnnouncement | None = None
    """The weights to which the file, an adapter, is added; None if the file is the whole version."""
    part_bytes: int = 0
    """Size of all parts except the last; 0 if no other host fetches the file."""
    parts_digest: str = ""
    """Digest of the digests of all parts, in order (``pipeline.weights.digest``); may be empty."""


class RelayAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves the versions that its host has."""

    worker: str
    endpoint: str
    public_key: str = ""


class RelayPlace(NamedTuple):
    """A relay's place in order of arrival. Lower places only change when a relay leaves."""

    position: int
    """Position in order of arrival, from 0."""
    num_relays: int
    """Number of relays, including this one."""


class Vitals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's measurements of its own process and host, in each heartbeat.

    Names and units are those of a run's history. Unknown figures are absent. Sums only grow within an
    incarnation, so that any two heartbeats give a rate. The number of pieces of work held is in
    ``Heartbeat.held``."""

    loop_lag_ms: float = 0.0
    """Longest delay of the main loop's timer since the last heartbeat; for a blocked loop, the time since the
    timer was due."""
    cpu: float = 0.0
    """Cores that this process used since the last heartbeat, without child processes."""
    num_fds: int | None = None
    """Open file descriptors."""
    disk_free_bytes: int | None = None
    """Free space on the file system of the run's folder, for this user."""
    disk_free_share: float | None = None
    """The same as a share of the file system, from 0 to 1."""
    gpu_util: float | None = None
    """Share of the time in which a kernel ran, from 0 to 1; mean of the visible GPUs."""
    gpu_mem_bytes: int | None = None
    """Used memory of the visible GPUs, by all processes."""
    gpu_power_w: float | None = None
    """Total power draw of the visible GPUs, in watts."""
    gpus: tuple[str, ...] = ()
    """Short ids of the GPUs on which it computes; empty if unknown."""
    service: dict[str, ServiceSums] = {}
    """Finished work by kind: ``[pieces, seconds, tokens]``."""
    errors: int = 0
    """Pieces of work that failed: scores, optimiser steps, checkpoints."""
    retries: int = 0
    """Repeated calls of the ledger and requests to endpoints."""
    refused: int = 0
    """Messages that its mailboxes refused, because of checksum, schema, size or sender."""
    ledger_rtt_ms: float = 0.0
    """Moving average of the time from a ledger call to its answer, or the age of an older unanswered call."""
    oldest_age_s: float = 0.0
    """Age of the oldest work that it holds, by its monotonic clock; 0 if none."""
    input_depth: int | None = None
    """Work waiting for this worker, as far as it knows."""
    output_depth: int | None = None
    """Finished work waiting to be stored or sent."""


class CheckDigests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A generator's answer to a self-check of the fleet."""

    number: int = 0
    """Number of the check; 0 for no answer."""
    policy_version: int = -1
    """The version with which it was sampled."""
    tokens: str = ""
    logprobs: str = ""


LOGPROB_GAP: Final = "logprob_gap:"
"""Prefix of the learner's counters, followed by a generator's name: mean of |log p of the learner - log p of
the generator| over the tokens of its newest checked chunks, in nats."""
JUDGMENTS_ABSENT: Final = "judgments_absent_"
"""Prefix of a reward worker's counters, followed by the reason: wrong responses without a judgment."""
LOGPROB_USUAL_GAP: Final = "logprob_usual_gap:"
"""The same for chunks of other generators, at the same version lags."""
STANDSTILL: Final = "standstill_s"
"""Counter of a generator: duration of its engine's latest consecutive turns without a token, in seconds."""
LONGEST_STANDSTILL: Final = "longest_standstill_s"
"""The longest such time that was followed by tokens."""
