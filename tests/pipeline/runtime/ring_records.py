"""Messages that have ended, and what a reader of a flow ring finds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeline.runtime.flow_ring import SLOTS, FlowRingReader, FlowRingWriter, LinkSide, LinkState, SlotForm
from pipeline.runtime.message_record import MessageOutcome, MessageRecord, key_of
from protocol.ids import ChunkId, TrajectoryId

LINK = "generator-0>reward-0"


def chunk_id(number: int) -> ChunkId:
    return ChunkId(TrajectoryId("t", number, 0), 0)


class Ended(NamedTuple):
    """A message as a ring has it."""

    at_s: float
    link: str = LINK
    outcome: MessageOutcome = MessageOutcome.STORED
    key: int = key_of(chunk_id(7))
    size: int = 12
    waited_s: float = 0.5
    service_s: float = 0.25
    storing_s: float = 0.125
    policy_version: int = 3


def write(writer: FlowRingWriter, record: Ended | LinkState, number: int = 7) -> None:
    """Write a message of chunk ``number``, or a state."""
    if isinstance(record, LinkState):
        writer.state(record)
        return
    done_s = record.at_s - record.storing_s
    begun_s = done_s - record.service_s
    made = MessageRecord(chunk_id(number), begun_s - record.waited_s, record.link, record.size, record.policy_version)
    made.begun_s, made.done_s, made.ended_s, made.outcome = begun_s, done_s, record.at_s, record.outcome
    writer.message(made)


def read(reader: FlowRingReader) -> list[Ended | LinkState]:
    """Return the records since the last call, in order."""
    found = list[Ended | LinkState]()
    for part in reader.read():
        for row in np.frombuffer(part.data, SLOTS):
            link, at_s, size = part.names.get(int(row["link"]), ""), float(row["time_s"]), int(row["size"])
            if row["kind"] == SlotForm.COMPLETION:
                waited_s, service_s, storing_s = (float(row[name]) for name in ("waited_s", "service_s", "storing_s"))
                what, key, version = MessageOutcome(int(row["what"])), int(row["key"]), int(row["policy_version"])
                found.append(Ended(at_s, link, what, key, size, waited_s, service_s, storing_s, version))
            else:
                first, second, third = row["counts"].tolist()
                age_s, version = float(row["oldest_age_s"]), int(row["state_version"])
                side = LinkSide(int(row["what"]))
                found.append(LinkState(at_s, link, side, (first, second, third), size, age_s, version))
    return found
