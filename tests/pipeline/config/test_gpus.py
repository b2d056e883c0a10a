"""Claims about the GPUs that a fleet file gives to workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.gpus import check_gpus, gpus_of
from pipeline.preflight.checks import preflight
from pipeline.supervisor.fleet_plan import worker_name, worker_number
from pipeline.supervisor.fleet_size import SizeGuard, desired_counts
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.op_config import op_config

PAIRS = ("generation.engine=vllm", "generation.vllm.tensor_parallel_size=2", "fleet.gpus.generator=[3,4,5,6]")


def test_gpus_are_dealt_out_in_order_as_many_as_a_worker_needs(tmp_path: Path) -> None:
    config = op_config(tmp_path, *PAIRS, "fleet.gpus.reference=[0]", "fleet.generator=2")
    assert [gpus_of(config, Role.GENERATOR, number) for number in range(3)] == [(3, 4), (5, 6), (3, 4)]
    assert gpus_of(config, Role.REFERENCE, 0) == (0,)
    assert gpus_of(config, Role.LEARNER, 0) == gpus_of(config, Role.REWARD, 0) == ()


def test_a_workers_name_tells_its_number() -> None:
    for role, number in ((Role.GENERATOR, 0), (Role.GENERATOR, 12), (Role.LEARNER, 0), (Role.VALUE, 0)):
        assert worker_number(worker_name(role, number)) == number


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("fleet.gpus.generator=[1]", "fleet.generator=2"), "has 1 GPUs; expected 2 for 2 generator of 1 each"),
        ((*PAIRS, "fleet.generator=3"), "has 4 GPUs; expected 6 for 3 generator of 2 each, or a larger multiple of 2"),
        ((*PAIRS[:2], "fleet.gpus.generator=[3,4,5]"), "has 3 GPUs; expected 2 for 1 generator of 2 each"),
        (("fleet.gpus.learner=[0]", "model.device=cuda:1"), "but model.device is cuda:1; set it to auto"),
        (("fleet.gpus.generator=[0]", "fleet.standby=1"), "fleet.standby is 1, and fleet.gpus.generator is set"),
        (("fleet.gpus.learner=[0]", "fleet.standby_learner=on"), "fleet.standby_learner is on, and fleet.gpus.learner"),
        (("fleet.gpus.generator=[0,1]", "fleet.max_generators=3"), "has 2 GPUs; expected 3"),
        (("fleet.gpus.generator=[0]", "launch.on=slurm", 'launch.roles=["generator"]'), "whose workers run elsewhere"),
    ],
)
def test_gpus_that_do_not_suffice_or_are_not_used_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match="fleet") as refused:
        preflight(op_config(tmp_path, *overrides))
    assert sentence in str(refused.value)


def test_a_fleet_grows_only_as_far_as_its_gpus_go(tmp_path: Path) -> None:
    config = op_config(tmp_path, "fleet.gpus.generator=[1,2,3]")
    counts, guard = desired_counts(config), SizeGuard(config)
    assert guard.allows({**counts, Role.GENERATOR: 3}) and not guard.allows({**counts, Role.GENERATOR: 4})
    check_gpus(config, {**counts, Role.GENERATOR: 0})
