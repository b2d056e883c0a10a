"""Claims that hold for all that answer requests for parts: the run's host, a relay and the learner's store."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import structlog

from pipeline.runtime.answering import Answers, answer_requests
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.supervisor.joining.file_fetch import FileServer
from pipeline.weights.digest import PartDigests
from pipeline.weights.relay import PartialVersion, Relay
from protocol.channel import Requester
from protocol.messages import FilePart, FileRequest, Message, WeightsPart, WeightsRequest
from tests.pipeline.weights.hosts import PART, Learner
from tests.pipeline.weights.versions import numbers, published
from tests.protocol.samples import chunk
from tests.transports import close_transports, zmq_transport

LIMIT_S = 10.0


@dataclass
class Served:
    answers: Answers
    data: bytes
    """What a requester can get."""
    ask: Callable[[int, int], Message]
    """Makes a request for at most so many bytes from an offset."""
    slow: Message | None = None
    """A request whose answer takes time."""
    end_slow: Callable[[], None] = lambda: None


def run_host(folder: Path) -> Served:
    data = bytes(range(256)) * 40
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    (folder / "file").write_bytes(data)
    os.mkfifo(folder / "slow")
    server = FileServer({digest: folder / "file", "sha256:slow": folder / "slow"}, max_part_bytes=PART)
    slow = FileRequest(digest="sha256:slow", offset=0, max_bytes=1)

    def end_slow() -> None:
        # it waits for a writer; opened to read as well, so that this does not wait for it
        os.close(os.open(folder / "slow", os.O_RDWR))

    return Served(server, data, lambda at, most: FileRequest(digest=digest, offset=at, max_bytes=most), slow, end_slow)


def relay(_: Path) -> Served:
    data = np.arange(4 * PART, dtype=np.int64).astype(np.uint8)
    digests = PartDigests.of(data, PART, "xxh3-128")
    wanted = WeightsAnnouncement(
        path="",
        host="",
        policy_version=3,
        digest="d",
        num_bytes=data.size,
        part_bytes=PART,
        parts_digest=digests.digest,
    )
    holding = PartialVersion(wanted, np.zeros(data.size, np.uint8))
    holding.expect(digests)
    for index in range(2):
        assert holding.put(index, data[index * PART : (index + 1) * PART])
    made = Relay(RealClock())
    made.hold(holding)

    def ask(at: int, most: int) -> Message:
        return WeightsRequest(version=3, offset=at, max_bytes=most, digest="d")

    def end_slow() -> None:
        holding.put(2, data[2 * PART : 3 * PART])

    return Served(made, data[: 2 * PART].tobytes(), ask, ask(2 * PART, 1), end_slow)


def store(folder: Path) -> Served:
    learner = Learner(folder, "xxh3-128")
    stored = learner.store.publish(3, published(numbers(0)))
    return Served(
        learner, stored.path.read_bytes(), lambda at, most: WeightsRequest(version=3, offset=at, max_bytes=most)
    )


@asynccontextmanager
async def asking(served: Served) -> AsyncIterator[Requester]:
    transport = zmq_transport("host-1#1", high_water_mark=16)
    responder = zmq_transport("host-0#1", high_water_mark=16).responder("tcp://127.0.0.1:*")
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            log = structlog.get_logger("answering")
            serving = tasks.create_task(answer_requests(responder, served.answers, RealClock(), log))
            yield transport.requester(responder.endpoint)
            serving.cancel()
    finally:
        close_transports()


def data_of(answer: Message) -> tuple[int, bytes]:
    assert isinstance(answer, FilePart | WeightsPart)
    return answer.offset, answer.data.tobytes()


CLIENTS = [run_host, relay, store]


@pytest.mark.parametrize("made", CLIENTS)
async def test_a_range_comes_from_its_offset_and_never_more_than_was_asked_for(
    tmp_path: Path, made: Callable[[Path], Served]
) -> None:
    served = made(tmp_path)
    async with asking(served) as requester:
        for at, most in ((0, 100), (70, 1), (PART, 50)):
            answer = await requester.request(served.ask(at, most), timeout_s=LIMIT_S)
            assert data_of(answer) == (at, served.data[at : at + most])
        _, whole = data_of(await requester.request(served.ask(0, 1 << 30), timeout_s=LIMIT_S))
        assert served.data.startswith(whole) and 0 < len(whole) <= 2 * PART, "a part has a limit of its own"


@pytest.mark.parametrize("made", CLIENTS)
async def test_a_message_that_is_no_request_is_logged_once_and_ends_nothing(
    tmp_path: Path, made: Callable[[Path], Served]
) -> None:
    served = made(tmp_path)
    with structlog.testing.capture_logs() as lines:
        async with asking(served) as requester:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await requester.request(chunk(), timeout_s=0.2)
            answer = await requester.request(served.ask(0, 9), timeout_s=LIMIT_S)
            assert data_of(answer) == (0, served.data[:9])
    assert [line["event"] for line in lines] == ["request_refused"]


@pytest.mark.parametrize("made", [run_host, relay])
async def test_an_answer_that_takes_time_delays_no_other(tmp_path: Path, made: Callable[[Path], Served]) -> None:
    served = made(tmp_path)
    assert served.slow is not None
    async with asking(served) as requester, asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(requester.request(served.slow, timeout_s=LIMIT_S))
        try:
            await asyncio.sleep(0.05)
            for _ in range(5):
                answer = await requester.request(served.ask(0, 9), timeout_s=LIMIT_S / 5)
                assert data_of(answer) == (0, served.data[:9])
            assert not slow.done()
        finally:
            served.end_slow()
