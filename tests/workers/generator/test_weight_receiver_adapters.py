"""Claims about versions that are adapters: their base comes once, and the generator serves the
merged weights or nothing."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from pipeline.algorithms.batching import TrainingSample
from pipeline.weights.store import fetched_folder, weights_folder
from protocol.errors import WeightsDamaged, WeightsRejected
from tests.workers.engines.adapters import make_adapter, merged
from tests.workers.engines.tiny import tiny_model
from tests.workers.generator.test_weight_receiver import Recorder, World, damage, opened
from workers.engines.generation.torch_weights import TorchWeights
from workers.engines.model.adapter import Adapter
from workers.engines.training.publishing import TorchPublishing
from workers.learner.weight_publisher import WeightPublisher


class Adapting(TorchPublishing):
    """The part of a training backend with an adapter that publishing reads."""

    def __init__(self, *, seed: int = 0) -> None:
        self._model = tiny_model(seed=seed)
        self.version = 0

    def adapter(self) -> Adapter:
        return make_adapter(self._model, seed=self.version)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("merged weights are not published")

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        raise AssertionError(f"no probe is published: {samples}")

    def served(self, version: int) -> dict[str, torch.Tensor]:
        """Return the tensors that a generator must compute with."""
        return merged(make_adapter(self._model, seed=version))


class TorchRecorder(TorchWeights, Recorder):
    """An engine that keeps a copy of the tensors that it was given."""

    def load_weights(self, tensors: Any, policy_version: int) -> None:
        self.policy_version = policy_version
        self.served[policy_version] = {name: tensor.clone() for name, tensor in tensors.items()}  # type: ignore[assignment]


def adapted(tmp_path: Path, **settings: Any) -> Any:
    return opened(tmp_path, backend=Adapting(), engine=TorchRecorder(), **settings)


def check_served(world: World, version: int) -> None:
    expected, taken = world.backend.served(version), cast("dict[str, torch.Tensor]", world.engine.served[version])
    assert world.engine.policy_version == version
    assert expected.keys() == taken.keys()
    for name, tensor in expected.items():
        assert torch.equal(taken[name], tensor), name


async def announced_bytes(world: World) -> tuple[int, int]:
    """Bytes of the newest version, and of its base."""
    announced = await world.learner.registry.weights()
    assert announced is not None
    assert announced.base is not None
    return announced.num_bytes, announced.base.num_bytes


DIGEST_BYTES = {"auto": 0, "wire": 16}
"""Of a version of one part, as it comes."""


def published(tmp_path: Path, name: str = "base.safetensors") -> Path:
    return weights_folder(tmp_path, shared_memory=False) / name


@pytest.mark.parametrize("path", ["auto", "wire"])
async def test_every_version_is_served_merged_bit_for_bit_and_the_base_comes_once(tmp_path: Path, path: str) -> None:
    async with adapted(tmp_path, path=path) as world:
        for version in range(1, 8):
            await world.publish(version)
            await world.take()
            check_served(world, version)
        version_bytes, base_bytes = await announced_bytes(world)
        assert version_bytes < base_bytes / 2
        assert world.ctx.counters["weights_bases"] == 1
        assert world.ctx.counters["weights_bytes"] == base_bytes + 7 * version_bytes + 8 * DIGEST_BYTES[path]
        assert world.learner.counters["published_bytes"] == base_bytes + 7 * version_bytes
        assert world.ctx.counters["weights_merge_s"] > 0.0
        names = {file.name for file in published(tmp_path).parent.iterdir() if file.suffix == ".safetensors"}
        assert names == {"base.safetensors", "v00000006.safetensors", "v00000007.safetensors"}


@pytest.mark.parametrize("path", ["auto", "wire"])
async def test_a_generator_that_comes_late_gets_the_base_and_the_newest_version_alone(
    tmp_path: Path, path: str
) -> None:
    async with adapted(tmp_path, path=path) as world:
        for version in range(1, 5):
            await world.publish(version)
        await world.take()
        check_served(world, 4)
        assert world.ctx.counters["weights_bytes"] == sum(await announced_bytes(world)) + 2 * DIGEST_BYTES[path]


async def test_a_served_version_stays_what_it_is_while_later_ones_are_merged(tmp_path: Path) -> None:
    async with adapted(tmp_path) as world:
        taken: dict[int, dict[str, torch.Tensor]] = {}

        def take(tensors: Any, version: int) -> None:
            world.engine.policy_version = version
            taken[version] = dict(tensors)

        world.engine.load_weights = take
        await world.publish(1)
        await world.take()
        for version in range(2, 5):
            await world.publish(version)
            await world.taker.poll()
        for name, tensor in world.backend.served(1).items():
            assert torch.equal(taken[1][name], tensor), name


async def test_merged_weights_that_the_engine_refuses_leave_no_file_behind(tmp_path: Path) -> None:
    async with adapted(tmp_path) as world:

        def refuse(tensors: Any, version: int) -> None:
            raise WeightsRejected("another architecture")

        world.engine.load_weights = refuse
        await world.publish(1)
        await world.taker.poll()
        staged = world.taker._staged
        assert staged is not None and staged.merged is not None
        with pytest.raises(WeightsRejected):
            await world.taker.swap()
        with pytest.raises(ValueError, match="closed file"):
            _ = staged.merged.lasting_path


@pytest.mark.timeout(30)
async def test_merged_pages_are_given_back_after_the_swap_and_not_by_the_engine_in_it(tmp_path: Path) -> None:
    async with adapted(tmp_path) as world:
        pages: list[weakref.ref[np.ndarray]] = []
        served: list[dict[str, torch.Tensor]] = []

        def use_where_they_lie(tensors: Any, version: int) -> None:
            world.engine.policy_version = version
            served[:] = [dict(tensors)]
            assert all(ref() is not None for ref in pages), "they were freed in the pause"

        world.engine.load_weights = use_where_they_lie
        for version in range(1, 4):
            await world.publish(version)
            await world.taker.poll()
            staged = world.taker._staged
            assert staged is not None and staged.merged is not None
            new = weakref.ref(staged.merged.data)
            del staged
            await world.taker.swap()
            while any(ref() is not None for ref in pages):  # noqa: ASYNC110 -- a thread gives them back, and tells nobody
                await asyncio.sleep(0.001)
            pages = [new]


async def test_a_base_that_is_damaged_where_it_was_published_is_refused_until_it_is_mended(tmp_path: Path) -> None:
    async with adapted(tmp_path) as world:
        await world.publish(1)
        damage(published(tmp_path))
        with pytest.raises(WeightsDamaged, match=r"base\.safetensors .* as it was published"):
            await world.taker.poll()
        assert world.ctx.counters["rejected_version"] == 1
        assert not world.taker.has_newer
        world.beat(rejected_version=1)
        await world.clock.advance(2.0)
        await world.publisher.repair(1, world.backend)
        await world.take()
        check_served(world, 1)
        assert world.ctx.counters["rejected_version"] == -1


async def test_a_base_that_is_damaged_in_use_serves_no_version_until_it_is_mended(
    tmp_path: Path,
) -> None:
    async with adapted(tmp_path) as world:
        await world.publish(1)
        await world.take()
        damage(published(tmp_path))
        await world.publish(2)
        with pytest.raises(WeightsDamaged):
            await world.taker.poll()
        assert list(world.engine.served) == [1]
        world.beat(rejected_version=2)
        await world.clock.advance(2.0)
        await world.publisher.repair(2, world.backend)
        await world.take()
        check_served(world, 2)


async def test_a_fetched_base_that_is_damaged_is_fetched_again(tmp_path: Path) -> None:
    async with adapted(tmp_path, path="wire") as world:
        await world.publish(1)
        await world.take()
        damage(fetched_folder(tmp_path, shared_memory=False) / "host.base" / "base.safetensors")
        await world.publish(2)
        await world.take()
        check_served(world, 2)
        assert world.ctx.counters["weights_bases"] == 2
        assert world.ctx.counters["rejected_version"] == -1


@pytest.mark.parametrize("path", ["auto", "wire"])
async def test_a_damaged_adapter_is_refused_and_mended_and_its_base_is_kept(tmp_path: Path, path: str) -> None:
    async with adapted(tmp_path, path=path) as world:
        await world.publish(1)
        await world.take()
        damage(await world.publish(2))
        with pytest.raises(WeightsDamaged):
            await world.taker.poll()
        base = published(tmp_path).stat().st_ino
        world.beat(rejected_version=2)
        await world.clock.advance(2.0)
        await world.publisher.repair(2, world.backend)
        assert published(tmp_path).stat().st_ino == base
        await world.take()
        check_served(world, 2)
        assert world.ctx.counters["weights_bases"] == 1


@pytest.mark.parametrize("path", ["auto", "wire"])
async def test_a_new_learner_needs_a_new_base_only_on_another_start_model(tmp_path: Path, path: str) -> None:
    async with adapted(tmp_path, path=path) as world:
        await world.publish(1)
        await world.take()
        for version, seed in ((2, 0), (3, 5)):
            world.publisher._store = WeightPublisher(
                world.learner
                # as a new process would: the folder is emptied
            )._store
            world.backend = Adapting(seed=seed)
            await world.publish(version)
            await world.take()
            check_served(world, version)
        assert world.ctx.counters["weights_bases"] == 2


async def test_a_generator_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = fetched_folder(tmp_path, shared_memory=False)
    async with adapted(tmp_path, path="wire") as world:
        await world.publish(1)
        await world.take()
        files = {file.name for file in folder.rglob("*.safetensors")}
        assert files == {"base.safetensors", "v00000001.safetensors"}
    assert not folder.exists()


async def test_merged_weights_that_nobody_uses_any_more_are_freed(tmp_path: Path) -> None:
    folder = fetched_folder(tmp_path, shared_memory=False)
    async with adapted(tmp_path) as world:
        for version in range(1, 4):
            await world.publish(version)
            await world.taker.poll()
            await only_merged(folder, 1)
            # the second is replaced before it was served
            if version != 2:
                await world.take()
                # the engine has a copy
                await only_merged(folder, 0)


async def only_merged(folder: Path, expected: int) -> None:
    """Wait until this process maps so many unnamed files of a folder: a thread lets go of its last
    call a moment after it."""
    async with asyncio.timeout(30):
        while num_unnamed(folder) != expected:  # noqa: ASYNC110 -- of maps the kernel tells nobody
            await asyncio.sleep(0.001)


def num_unnamed(folder: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if line.endswith("(deleted)") and f"{folder}/" in line})
