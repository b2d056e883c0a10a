"""The record of one message at one end of its link, or of one piece of work.

Inboxes and outboxes (``pipeline.runtime.open_messages``) make it. When it ends, ``FlowRecorder`` packs it into the
flow ring, from which Perfetto is drawn, and makes its OpenTelemetry span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import xxhash

from protocol.ids import ChunkId


class MessageOutcome(IntEnum):
    """How a message left one end of a link. The numbers are those of the flow ring."""

    SENT = 1
    """A link took the message."""
    GIVEN_UP = 2
    """No link took it in time; the ledger's overdue index will hand it out."""
    STORED = 3
    """The ledger has the message's result."""
    UNSTORED = 4
    """It was handled without a result: failed, unwanted or postponed."""


@dataclass(slots=True, eq=False)
class MessageRecord:
    """Times are by the worker's monotonic clock."""

    chunk: ChunkId | None
    taken_s: float
    """When it was produced at the sender; when it arrived, or the ledger handed it out, at the receiver."""
    link: str | None = ""
    """Name from ``link_name``; empty for work of the ledger. None for a sampled window, which is not in the ring,
    since its chunk's messages are."""
    size: int = 0
    """Expected work in tokens."""
    policy_version: int = -1
    """The newest version that sampled it; at the learner, the one that it trained."""
    span: str = ""
    """Name of its span, which is made once it is stored or has failed; empty for none."""
    facts: Mapping[str, str | int] = field(default_factory=dict[str, str | int])
    """Attributes of the span."""
    trace: str = ""
    """Context of the span that caused it, as W3C's ``traceparent``. Unverified."""
    begun_s: float | None = None
    done_s: float | None = None
    """When its result was there, to be stored."""
    ended_s: float = 0.0
    outcome: MessageOutcome | None = None
    error: str = ""
    """Why it failed."""

    def times_s(self) -> tuple[float, float, float]:
        """Return how long it waited (for a link with room, or until work began), was worked on, and was stored."""
        done_s = self.ended_s if self.done_s is None else self.done_s
        begun_s = done_s if self.begun_s is None else self.begun_s
        return begun_s - self.taken_s, done_s - begun_s, self.ended_s - done_s


def key_of(chunk: ChunkId | None) -> int:
    """Return the number by which all records of a chunk can be joined."""
    return xxhash.xxh3_64_intdigest("" if chunk is None else str(chunk))
