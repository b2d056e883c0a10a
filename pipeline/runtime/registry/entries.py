"""Parts of registry entries: announcements of weights and relays, a worker's vitals, names of counters."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from pipeline.process.work import ServiceSums


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


# A worker's vitals: measurements of its own process and host, in each heartbeat.
#
# Names and units are those of a run's history. Unknown figures are absent. Sums only grow within an
# incarnation, so that any two heartbeats give a rate.


class Vitals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker's measurements. ``Heartbeat.held`` is the number of the work that it holds."""

    loop_lag_ms: float = 0.0
    """Longest delay of the main loop's timer since the last heartbeat; of a blocked loop,
    the time since the timer was due."""
    cpu: float = 0.0
    """Cores that this process used since the last heartbeat; its child processes apart."""
    num_fds: int | None = None
    """Open file descriptors."""
    disk_free_bytes: int | None = None
    """Room on the file system of the run's folder, for this user."""
    disk_free_share: float | None = None
    """The same as a share of that file system, from 0 to 1."""
    gpu_util: float | None = None
    """Share of time that a kernel ran, from 0 to 1: the mean of the visible GPUs."""
    gpu_mem_bytes: int | None = None
    """Used memory of the visible GPUs, of all processes on them."""
    gpu_power_w: float | None = None
    """Power draw of the visible GPUs together, in watts."""
    gpus: tuple[str, ...] = ()
    """Short ids of the GPUs that it computes on; empty where that is not known."""
    service: dict[str, ServiceSums] = {}
    """Finished work by kind: ``[pieces, seconds, tokens]``."""
    errors: int = 0
    """Pieces of work that failed: scores, optimiser steps, checkpoints."""
    retries: int = 0
    """Calls of the ledger, and requests to endpoints, that were repeated."""
    refused: int = 0
    """Messages that its mailboxes refused: checksum, schema, size or sender."""
    ledger_rtt_ms: float = 0.0
    """Moving mean of the time from a ledger call to its answer; of an older call without an answer,
    its age."""
    oldest_age_s: float = 0.0
    """Age of the oldest work that it holds, by its own monotonic clock; 0 for none."""
    input_depth: int | None = None
    """Work that waits for this worker, as far as the worker knows."""
    output_depth: int | None = None
    """Finished work that waits to be stored or sent."""


class CheckDigests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A generator's answer to a self-check of the fleet."""

    number: int = 0
    """The check's; 0 for no answer."""
    policy_version: int = -1
    """It was sampled with this version."""
    tokens: str = ""
    """Digest of the tokens."""
    logprobs: str = ""
    """Digest of their log-probs."""


LOGPROB_GAP: Final = "logprob_gap:"
"""Begin of counters of the learner: a generator's name follows. Mean of |log p of the learner - log
p of the generator| over the tokens of its newest checked chunks, in nats."""
JUDGMENTS_ABSENT: Final = "judgments_absent_"
"""Begin of counters of a reward worker: the reason follows. Wrong responses without a judgment."""
LOGPROB_USUAL_GAP: Final = "logprob_usual_gap:"
"""The same of other generators' chunks, at the same lags in versions."""
STANDSTILL: Final = "standstill_s"
"""Counter of a generator: seconds of the newest turns of its engine without a token, in a row."""
LONGEST_STANDSTILL: Final = "longest_standstill_s"
"""The longest such time that tokens have ended."""
