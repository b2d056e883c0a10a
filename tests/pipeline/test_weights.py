"""Claims about published weights: files, digests, and ranges over real ZeroMQ with CURVE."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from pipeline.runtime.registry import WeightsAnnouncement
from pipeline.weights import WeightsStore, digest_file, fetch_file, fetch_folder, local_file, weights_folder
from protocol.channel import Requester
from protocol.errors import ConfigError, UnknownMessage, WeightsRejected
from protocol.messages import WeightsPart, WeightsRequest
from protocol.zeromq import CurveKeys, ZmqTransport

BYTES = bytes(range(256)) * 100


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "published", keep=2)


def _publish(store: WeightsStore, version: int, data: bytes = BYTES, *, endpoint: str = "") -> WeightsAnnouncement:
    return store.announcement(store.publish(version, lambda path: path.write_bytes(data)), endpoint=endpoint)


def test_a_published_file_is_found_on_its_host_by_size_and_digest(store: WeightsStore) -> None:
    announced = _publish(store, 1)
    path = local_file(announced)
    assert path is not None
    assert path.read_bytes() == BYTES
    assert announced.digest == digest_file(path)
    assert path.stat().st_mode & 0o777 == 0o400


def test_a_file_that_was_changed_or_cut_is_not_taken(store: WeightsStore) -> None:
    announced = _publish(store, 1)
    path = Path(announced.path)
    path.chmod(0o600)
    path.write_bytes(BYTES[:-1] + b"!")
    assert local_file(announced) is None
    path.write_bytes(BYTES[:-1])
    assert local_file(announced) is None
    path.unlink()
    assert local_file(announced) is None


def test_the_oldest_versions_and_those_of_an_earlier_learner_go(store: WeightsStore, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        _publish(store, version)
    names = {path.name for path in (tmp_path / "published").iterdir()}
    assert names == {"v00000002.safetensors", "v00000003.safetensors"}
    WeightsStore(tmp_path / "published", keep=2)
    assert list((tmp_path / "published").iterdir()) == []


def test_a_request_for_a_version_or_a_range_that_is_not_held_is_answered_with_nothing(store: WeightsStore) -> None:
    _publish(store, 1)
    wrong = [(2, 0, 10), (1, -1, 10), (1, len(BYTES), 10), (1, 2**63, 10), (1, 0, 0)]
    for version, offset, max_bytes in wrong:
        part = store.answer(WeightsRequest(version=version, offset=offset, max_bytes=max_bytes))
        assert part.data.size == 0
        assert part.total_bytes == 0
    with pytest.raises(UnknownMessage, match="answers WeightsRequest only"):
        store.answer(WeightsPart(version=1, offset=0, total_bytes=0, data=part.data))


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert weights_folder(tmp_path / "a", shared_memory=True) != weights_folder(tmp_path / "b", shared_memory=True)
    assert weights_folder(tmp_path / "a", shared_memory=False) == tmp_path / "a" / "weights"


@dataclass
class Wire:
    """A learner's endpoint and another worker's link to it, over tcp with CURVE."""

    endpoint: str
    requester: Requester


@asynccontextmanager
async def _over_tcp(store: WeightsStore, folder: Path) -> AsyncIterator[Wire]:
    keys = CurveKeys.load_or_create(folder / "keys")
    limits = {"high_water_mark": 4, "max_message_bytes": 1 << 20, "keys": keys}
    learner, generator = ZmqTransport("learner#1", **limits), ZmqTransport("generator-0#1", **limits)
    responder = learner.responder("tcp://127.0.0.1:*")

    async def serve() -> None:
        while True:
            await responder.serve_one(store.answer, timeout_s=5.0)

    try:
        async with asyncio.TaskGroup() as tasks:
            server = tasks.create_task(serve())
            yield Wire(responder.endpoint, generator.requester(responder.endpoint, server_key=learner.public_key))
            server.cancel()
    finally:
        learner.close()
        generator.close()


async def _fetch(announced: WeightsAnnouncement, requester: Requester, folder: Path) -> Path:
    return await fetch_file(announced, requester, folder, max_part_bytes=1000, timeout_s=5.0)


async def test_another_host_gets_the_file_in_bounded_parts(store: WeightsStore, tmp_path: Path) -> None:
    async with _over_tcp(store, tmp_path) as wire:
        announced = _publish(store, 3, endpoint=wire.endpoint)
        folder = fetch_folder(tmp_path, "generator-0")
        path = await _fetch(announced, wire.requester, folder)
        assert path.read_bytes() == BYTES
        assert folder.stat().st_mode & 0o777 == 0o700


async def test_bytes_that_do_not_match_the_digest_are_rejected_and_removed(store: WeightsStore, tmp_path: Path) -> None:
    async with _over_tcp(store, tmp_path) as wire:
        announced = msgspec.structs.replace(_publish(store, 3), digest="xxh3-128:00")
        with pytest.raises(WeightsRejected, match="expected xxh3-128:00"):
            await _fetch(announced, wire.requester, fetch_folder(tmp_path, "g"))
        assert list(fetch_folder(tmp_path, "g").iterdir()) == []


async def test_a_version_that_is_forgotten_while_it_travels_is_rejected(store: WeightsStore, tmp_path: Path) -> None:
    class Pruned:
        """Lets the learner publish two more versions after the third part."""

        def __init__(self, requester: Requester) -> None:
            self.requester = requester
            self.num_requests = 0

        async def request(self, message: WeightsRequest, *, timeout_s: float) -> object:
            self.num_requests += 1
            if self.num_requests == 3:
                _publish(store, 4)
                _publish(store, 5)
            return await self.requester.request(message, timeout_s=timeout_s)

        def close(self) -> None:
            self.requester.close()

    async with _over_tcp(store, tmp_path) as wire:
        announced = _publish(store, 3)
        with pytest.raises(WeightsRejected, match="take the newest announcement"):
            await _fetch(announced, Pruned(wire.requester), fetch_folder(tmp_path, "g"))
        assert list(fetch_folder(tmp_path, "g").iterdir()) == []


def _cut(announced: WeightsAnnouncement) -> None:
    path = Path(announced.path)
    path.chmod(0o600)
    path.write_bytes(BYTES[:5000])


def _remove(announced: WeightsAnnouncement) -> None:
    Path(announced.path).unlink()


@pytest.mark.parametrize("damage", [_cut, _remove])
async def test_a_file_that_vanishes_or_is_cut_on_the_learner_is_rejected(
    store: WeightsStore, tmp_path: Path, damage: Callable[[WeightsAnnouncement], None]
) -> None:
    async with _over_tcp(store, tmp_path) as wire:
        announced = _publish(store, 3)
        damage(announced)
        with pytest.raises(WeightsRejected):
            await _fetch(announced, wire.requester, fetch_folder(tmp_path, "g"))


def test_a_weights_folder_that_somebody_else_could_have_made_is_refused_and_left_alone(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    (ours / "precious").touch()
    (tmp_path / "link").symlink_to(ours)
    (tmp_path / "open").mkdir(mode=0o755)
    for folder in (tmp_path / "link", tmp_path / "open"):
        with pytest.raises(ConfigError, match="ours"):
            WeightsStore(folder, keep=1)
    assert (ours / "precious").exists()
