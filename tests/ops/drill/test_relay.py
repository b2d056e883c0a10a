"""Claims about a drill's relay: what it damages, and what it hands on."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import zmq

from ops.drill.relay import Relays, damage
from ops.drill.schedule import WIRE, FaultKind

MESSAGE = [b"envelope" * 4, b"body" * 50]
MEMORY = [[b"old", bytes([n])] for n in range(9)]


def handed(kind: FaultKind | None, num: int = 200) -> list[list[list[bytes]]]:
    rng = random.Random(0)
    return [damage(kind, MESSAGE, MEMORY, rng) for _ in range(num)]


def test_without_a_fault_a_message_passes_as_it_came() -> None:
    assert all(out == [MESSAGE] for out in handed(None))


@pytest.mark.parametrize(
    ("kind", "is_damaged"),
    [
        (FaultKind.CORRUPT, lambda out: len(out) == 1 and out[0] != MESSAGE and list(map(len, out[0])) == [32, 200]),
        (FaultKind.TRUNCATE, lambda out: len(out) == 1 and sum(map(len, out[0])) < 232),
        (FaultKind.DUPLICATE, lambda out: len(out) > 1 and all(each == MESSAGE for each in out)),
        (FaultKind.REPLAY, lambda out: out[0] == MESSAGE and all(each in MEMORY for each in out[1:]) and len(out) > 1),
        (FaultKind.GARBAGE, lambda out: out[0] == MESSAGE and len(out) == 2),
        (FaultKind.ONE_WAY, lambda out: out == []),
    ],
)
def test_a_fault_damages_most_messages_and_lets_some_pass(kind: FaultKind, is_damaged) -> None:
    outs = handed(kind)
    hit = [out for out in outs if out != [MESSAGE]]
    assert 100 < len(hit) < 200
    assert all(is_damaged(out) for out in hit)


def test_a_relay_hands_on_is_cut_off_and_goes_on(tmp_path: Path) -> None:
    context = zmq.Context()
    relays = Relays(tmp_path / "r", 0)
    try:
        mailbox = context.socket(zmq.PULL)
        mailbox.bind(f"ipc://{tmp_path / 'mailbox'}")
        address = relays.stand_before("reward-0", f"ipc://{tmp_path / 'mailbox'}")
        assert address is not None
        assert relays.stand_before("reward-0", address) is None, "a relay is not put before a relay"
        assert relays.stand_before("reward-0", f"ipc://{tmp_path / 'mailbox'}") == address
        sender = context.socket(zmq.PUSH)
        sender.setsockopt(zmq.IMMEDIATE, 1)
        sender.setsockopt(zmq.SNDTIMEO, 5000)
        sender.connect(address)
        sender.send_multipart(MESSAGE)
        assert mailbox.poll(5000) and mailbox.recv_multipart() == MESSAGE
        relays.set("reward-0", FaultKind.ONE_WAY)
        while relays.num_damaged < 5:
            sender.send_multipart(MESSAGE)
        relays.set("reward-0", FaultKind.PARTITION)
        deadline = time.monotonic() + 5.0
        sender.setsockopt(zmq.SNDTIMEO, 0)
        with pytest.raises(zmq.Again):
            while time.monotonic() < deadline:
                sender.send_multipart(MESSAGE)
        relays.set("reward-0", None)
        while mailbox.poll(0):
            mailbox.recv_multipart()
        sender.setsockopt(zmq.SNDTIMEO, 5000)
        sender.send_multipart([b"again", b""])
        assert mailbox.poll(5000)
    finally:
        relays.close()
        context.destroy(linger=0)


def test_a_relay_hands_on_in_another_order_and_keeps_nothing_for_long(tmp_path: Path) -> None:
    context = zmq.Context()
    relays = Relays(tmp_path / "r", 0)
    try:
        mailbox = context.socket(zmq.PULL)
        mailbox.bind(f"ipc://{tmp_path / 'mailbox'}")
        sender = context.socket(zmq.PUSH)
        sender.connect(str(relays.stand_before("reward-0", f"ipc://{tmp_path / 'mailbox'}")))
        relays.set("reward-0", FaultKind.REORDER)
        # the last one is alone in its round
        sent = [[b"%d" % number] for number in range(21)]
        for message in sent:
            sender.send_multipart(message)
        came = [mailbox.recv_multipart() for _ in sent if mailbox.poll(10_000)]
        assert sorted(came) == sorted(sent)
        assert came != sent
        assert relays.num_damaged > 0
    finally:
        relays.close()
        context.destroy(linger=0)


def test_every_wire_fault_is_one_that_a_relay_knows() -> None:
    assert {kind for kind in WIRE if handed(kind) == handed(None)} == {
        FaultKind.PARTITION, FaultKind.STALL, FaultKind.REORDER,
    }  # fmt: skip
