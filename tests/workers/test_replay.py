"""Claims about replays: a learner's updates come out bit for bit, and every difference is named."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.catalogue import rule_class
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import Claim, ClaimedUnit, Restart, Unit
from pipeline.ledger.version_history import VersionHistory
from pipeline.training.checkpoints import CheckpointFolder
from pipeline.training.spikes import LEAST, NO_LIMITS, StepLimits
from pipeline.training.update_log.folder import read_log
from pipeline.training.update_log.records import Origin
from protocol.errors import ConfigError, DataError, Diverged, StepDiffered
from protocol.ids import Incarnation, Role
from tests.pipeline.algorithms.own import own_objectives
from tests.pipeline.algorithms.value_units import chunk_units, group_units, responses, trajectory_units, with_guidance
from tests.workers.engines.tiny import tiny_model
from workers.engines.build import build_training_backend
from workers.engines.model import weights_file
from workers.engines.training.seam import StepResult
from workers.learner.policy_update import PolicyUpdate, is_made
from workers.learner.update_recorder import SEGMENT_KEY, UpdateRecorder
from workers.replay import Replay, Report, Request, main


def config_of(folder: Path, **changes: dict[str, Any]) -> RunConfig:
    model = folder / "model"
    if not model.exists():
        tiny_model().save_pretrained(model)
    settings: dict[str, Any] = {
        "run": {"name": "test", "dir": folder},
        "model": {"path": model},
        "data": {"train": [folder / "no-data.jsonl"]},
        "algorithm": {"group_size": 4, "num_minibatches": 2, "groups_per_update": 6},
        "learner": {"learning_rate": 3e-3, "warmup_updates": 2, "micro_batch_tokens": 100},
        "generation": {"window_tokens": 16, "max_response_tokens": 32},
    }
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    return RunConfig.model_validate(settings)


_LIVES: list[Learning] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _LIVES:
        life = _LIVES.pop()
        life.recorder.close()
        life.folder.close()


class Learning:
    """One life of a learner: the real backend, updates, recorder and checkpoints, on units that are
    drawn by number."""

    def __init__(self, config: RunConfig, epoch: int, *, tell_as: RunConfig | None = None) -> None:
        self.config = config
        self.backend = build_training_backend(config)
        who = Incarnation(Role.LEARNER, "learner", epoch)
        self.folder = CheckpointFolder(config.run_dir / "checkpoints", owner=str(who), keep=config.checkpoint.keep)
        checkpoint = self.folder.take_over()
        state = checkpoint.state if checkpoint else {}
        if checkpoint:
            self.backend.load(checkpoint.path)
        self.updates = PolicyUpdate(config, self.backend)
        self.recorder = UpdateRecorder(tell_as or config, config.run_dir, who, self.backend)
        origin = Origin.CHECKPOINT if checkpoint else Origin.START_MODEL
        self.recorder.start_log(origin, checkpoint.path if checkpoint else None, state.get("policy_version", 0))
        self.num_updates = state.get("num_updates", 0)
        _LIVES.append(self)
        # numbers were announced meanwhile
        self.version = state.get("policy_version", 0) if epoch == 1 else 100 * epoch
        self.history = VersionHistory((Restart(self.version, self.num_updates),) if epoch > 1 else ())
        self.recorder.history = self.history

    def units(self) -> list[ClaimedUnit]:
        drawn = responses(1000 * self.version + self.num_updates, num_groups=2)
        if self.config.needs_guidance:
            drawn = with_guidance(drawn, self.num_updates)
        make = {Unit.CHUNK: chunk_units, Unit.TRAJECTORY: trajectory_units, Unit.GROUP: group_units}
        return make[self.config.declaration.unit](drawn, self.config.generation.window_tokens)

    def update(self, units: list[ClaimedUnit] | None = None) -> None:
        given = self.units() if units is None else units
        claim = Claim(f"c{self.version}", self.version, tuple(unit.name for unit in given))
        self.recorder.batch(claim, given, self.num_updates + 1, self.version, self.updates.limits)
        prepared = self.updates.prepare(given)
        stepped = asyncio.run(
            self.updates.step(prepared.samples, policy_version=self.version, compute=_at_once, history=self.history)
        )
        made = int(is_made(stepped))
        self.recorder.outcome(prepared, stepped, self.num_updates + 1, self.version + made)
        if made:
            self.recorder.digested(self.version + 1, self.backend.digests())
        self.num_updates += made
        self.version += made

    def make(self, num: int) -> Learning:
        for _ in range(num):
            self.update()
        return self

    def checkpoint(self) -> Learning:
        state = {
            "policy_version": self.version, "num_updates": self.num_updates, SEGMENT_KEY: self.recorder.cut(),
        }  # fmt: skip
        self.folder.write(self.version, self.backend.snapshot(), state)
        return self


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def replayed(config: RunConfig, **request: Any) -> Report:
    return asyncio.run(Replay(Request(config.run_dir, **request), lambda _: None).run())


def versions(report: Report) -> list[int]:
    return [one.policy_version for one in report.remade]


def a_life_with_a_restart(config: RunConfig) -> None:
    """Versions 1 to 5, of which the checkpoint holds 3; then 201 to 203, from there."""
    Learning(config, 1).make(3).checkpoint().make(2)
    Learning(config, 2).make(2).checkpoint().make(1)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("dapo", {}),
        ("dapo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "proximal": "interpolate"}),
        ("tppo", {"positive_nll_coefficient": 0.1}),
        ("dapo", {"guidance": "mix"}),
        ("nlft", {}),
        ("nlft-first", {}),
    ],
)
def test_every_update_of_every_life_of_a_learner_comes_out_bit_for_bit(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    config = config_of(tmp_path, algorithm={**settings, "name": algorithm})
    a_life_with_a_restart(config)
    report = replayed(config)
    assert versions(report) == [1, 2, 3, 4, 5, 201, 202, 203]
    assert report.num_equal == 8
    assert report.first_difference is None
    assert (report.num_unreachable, report.environment) == (0, {})
    assert all(one.losses == one.recorded_losses and any(one.losses) for one in report.remade)


def test_an_objective_of_ones_own_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    folder = own_objectives(tmp_path, "replayed")
    own = {"name": "replayed.losses:QuadraticPull", "path": [folder]}
    config = config_of(tmp_path, algorithm=own)
    Learning(config, 1).make(3).checkpoint()
    report = replayed(config)
    assert (versions(report), report.num_equal) == ([1, 2, 3], 3)
    wider = replayed(config, what_if=("algorithm.pull=3.0",), check=False)
    assert wider.first_difference is not None, "the loss has an effect"


def imported_anew(package: str) -> None:
    """Forget a package's modules, as a new process has them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    rule_class.cache_clear()
    importlib.invalidate_caches()


def test_a_changed_source_of_an_objective_is_refused_by_its_modules_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package, beside = "sourced", "sourced_beside"
    folder = own_objectives(tmp_path, package)
    files = {f"{package}.losses": folder / package / "losses.py"}
    for name, file in ((f"{package}.helper", folder / package / "helper.py"), (beside, folder / f"{beside}.py")):
        file.write_text("FACTOR = 1.0\n")
        files[name] = file
    losses = files[f"{package}.losses"]
    extra = f"\n\nfrom {beside} import FACTOR as A\nfrom {package}.helper import FACTOR as B\n\n_ = A * B\n"
    losses.write_text(losses.read_text() + extra)
    own = {"name": f"{package}.losses:QuadraticPull", "path": [folder]}
    config = config_of(tmp_path, algorithm=own)
    Learning(config, 1).make(2).checkpoint()
    [segment] = read_log(config.run_dir / "updates")
    assert segment.start.sources.keys() == files.keys()
    assert replayed(config).num_equal == 2

    def change(source: Path, text: str) -> None:
        source.write_text(text)
        imported_anew(package)
        imported_anew(beside)

    for name, source in files.items():
        as_it_was = source.read_text()
        change(source, as_it_was + "# another\n")
        with pytest.raises(
            DataError, match=rf"{re.escape(name)} of the run's objective changed since learner#1 .*no-check"
        ):
            replayed(config)
        change(source, as_it_was)
    change(losses, losses.read_text() + "# another\n")
    assert main([str(config.run_dir), "--no-check"]) == 0
    assert f"{package}.losses of the run's objective changed" in capsys.readouterr().out
    assert replayed(config, check=False).environment.keys() == {f"source of {package}.losses"}


def test_a_range_begins_at_a_checkpoint_and_gives_the_weights_of_its_last_version(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    a_life_with_a_restart(config)
    report = replayed(config, after=3, until=4, out=tmp_path / "v4")
    assert (versions(report), report.num_equal) == ([4], 1)
    [segment] = [s for s in read_log(config.run_dir / "updates") if s.updates[0].batch.policy_version == 3]
    outcome = segment.updates[0].outcome
    assert outcome is not None
    backend = build_training_backend(config)
    backend.load(tmp_path / "v4")
    assert backend.digests() == outcome.digests


def test_micro_batches_that_the_device_chose_are_those_of_the_replay(tmp_path: Path) -> None:
    """Others would add in another order. The log has what was chosen, and the settings only "auto"."""
    told = config_of(tmp_path, learner={"micro_batch_tokens": "auto"})
    Learning(config_of(tmp_path), 1, tell_as=told).make(4).checkpoint()
    report = replayed(told)
    assert report.first_difference is None and len(versions(report)) == 4
    assert not report.environment


def test_a_learner_that_differs_from_its_log_is_found_at_once_by_the_tensors_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, algorithm={"num_minibatches": 1})
    told = config_of(tmp_path, algorithm={"num_minibatches": 1}, learner={"weight_decay": 0.5})
    Learning(config, 1, tell_as=told).make(2).checkpoint()
    report = replayed(config)
    assert versions(report) == [1]
    first = report.first_difference
    assert first is not None
    assert "model.embed_tokens.weight" in first.differing
    assert not any("norm" in name for name in first.differing), "norms have no weight decay: they are the same"
    assert main([str(config.run_dir), "--to", "1"]) == 1
    assert "version 1 (update 1) differs in model.embed_tokens.weight" in capsys.readouterr().out
    assert main([str(config.run_dir), "--json", "--to", "1"]) == 1
    assert json.loads(capsys.readouterr().out)["first_difference"]["policy_version"] == 1


def test_another_setting_on_the_same_data_tells_every_update_and_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path)
    Learning(config, 1).make(1).checkpoint()
    Learning(config, 2).make(1).checkpoint()
    assert main([str(config.run_dir), "--what-if", "learner.learning_rate=1e-4", "--no-check"]) == 0
    out = capsys.readouterr().out
    assert "version 1: differs in" in out
    assert "version 201: differs in" in out, (
        "the second life goes on from what the first came to under the other setting"
    )
    assert replayed(config, what_if=("learner.learning_rate=3e-3",)).num_equal == 2
    with pytest.raises(ConfigError, match=r"did you mean `learner\.learning_rate`"):
        replayed(config, what_if=("learner.learning_rte=1e-4",))


def test_updates_of_one_rank_replay_bit_for_bit_and_those_of_several_are_refused(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, learner={"backend": "fsdp2"})
    Learning(config, 1).make(2).checkpoint()
    assert replayed(config).num_equal == 2
    with pytest.raises(ConfigError, match=r"had 2 ranks, .* --what-if learner\.ranks=1 --no-check"):
        replayed(config, what_if=("learner.ranks=2",))


def test_a_start_model_or_a_checkpoint_that_is_not_what_it_was_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    Learning(config, 1).make(2).checkpoint().make(1)
    tiny_model(seed=1).save_pretrained(config.model.path)
    with pytest.raises(DataError, match="the start model does not hold the weights"):
        replayed(config)
    # begins at the checkpoint
    assert replayed(config, after=2).num_equal == 1
    backend = build_training_backend(config)
    folder = CheckpointFolder(config.run_dir / "checkpoints", owner="learner#9", keep=1)
    folder.take_over()
    folder.write(2, backend.snapshot(), {"policy_version": 2, "num_updates": 2})
    with pytest.raises(DataError, match=r"000002\.version-2 does not hold the weights"):
        replayed(config, after=2)


def test_units_with_nan_are_left_out_again_also_when_no_other_is_left(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    learning = Learning(config, 1).make(1)
    drawn = responses(5, num_groups=3)
    bad = replace(drawn[0], behavior_logprobs=np.full_like(drawn[0].behavior_logprobs, np.nan))
    learning.update(group_units([bad, *drawn[1:]], 16))
    learning.update(group_units([bad, *drawn[1:4]], 16))
    report = replayed(config)
    assert (versions(report), report.num_equal) == ([1, 2, 2], 3), "the third made no version"
    assert [one.num_samples for one in report.remade] == [8, 8, 0]
    outcomes = [update.outcome for update in read_log(config.run_dir / "updates")[0].updates]
    assert [outcome.refused if outcome else None for outcome in outcomes] == [(), ("0",), ("0",)]


def test_an_update_with_a_step_that_its_data_made_infinite_comes_out_bit_for_bit(tmp_path: Path) -> None:
    config = config_of(tmp_path, algorithm={"normalize_std": False})
    learning = Learning(config, 1).make(1)
    drawn = responses(5, num_groups=2)
    huge = replace(drawn[0], score=msgspec.structs.replace(drawn[0].score, reward=1e30))
    learning.update(group_units([huge, *drawn[1:]], 16))
    learning.make(1).checkpoint()
    outcomes = [update.outcome for update in read_log(config.run_dir / "updates")[0].updates]
    assert [outcome.applied if outcome else None for outcome in outcomes] == [(True, True), (False, True), (True, True)]
    report = replayed(config)
    assert (versions(report), report.num_equal) == ([1, 2, 3], 3)


def test_an_update_whose_steps_were_all_refused_has_no_version_in_its_log(tmp_path: Path) -> None:
    config = config_of(tmp_path, algorithm={"normalize_std": False, "num_minibatches": 1})
    learning = Learning(config, 1).make(1)
    drawn = responses(5, num_groups=2)
    huge = replace(drawn[0], score=msgspec.structs.replace(drawn[0].score, reward=1e30))
    before = learning.backend.digests()
    learning.update(group_units([huge, *drawn[1:]], 16))
    assert learning.version == 1 and learning.backend.digests() == before
    learning.make(1).checkpoint()
    learning.update(group_units([huge, *drawn[1:]], 16))
    learning.make(1).checkpoint()
    report = replayed(config)
    assert (versions(report), report.num_equal) == ([1, 1, 2, 2, 3], 5)
    assert [one.update for one in report.remade] == [1, 2, 2, 3, 3]
    assert versions(replayed(config, after=2)) == [3], "from the checkpoint of two updates"
    # a successor goes on from the same checkpoint, in a stretch of its own
    Learning(config, 2).make(1).checkpoint()
    assert replayed(config).num_equal == 6


@pytest.mark.parametrize(("spikes", "applied"), [("drop", False), ("train", True)])
def test_a_spike_is_refused_or_trained_on_again_when_the_log_is_replayed(
    tmp_path: Path, spikes: str, applied: bool
) -> None:
    config = config_of(tmp_path, algorithm={"normalize_std": False}, learner={"spike_factor": 20.0, "spikes": spikes})
    learning = Learning(config, 1).make(LEAST // 2).checkpoint()
    drawn = responses(5, num_groups=2)
    huge = replace(drawn[0], score=msgspec.structs.replace(drawn[0].score, reward=1e4))
    learning.update(group_units([huge, *drawn[1:]], 16))
    learning.make(1).checkpoint()
    first, second = [update for segment in read_log(config.run_dir / "updates") for update in segment.updates][-2:]
    assert first.outcome and second.outcome and np.isfinite(first.outcome.losses).all()
    assert first.outcome.applied == (applied, True) and second.outcome.applied == (True, True)
    assert first.outcome.grad_norms[0] > first.batch.grad_norm_limit > first.outcome.grad_norms[1]
    # a replay from the checkpoint has seen none of the steps before it
    report = replayed(config, after=LEAST // 2)
    assert (versions(report), report.num_equal) == ([LEAST // 2 + 1, LEAST // 2 + 2], 2)
    other = replayed(config, what_if=("learner.spike_factor=0",), check=False)
    assert [one.update for one in other.remade if one.differing] == ([] if applied else [9, 10])


def test_a_step_that_differs_the_second_time_is_right_when_the_log_is_replayed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    learning = Learning(config, 1).make(1).checkpoint()
    step, attempts = learning.backend.step, list[int]()

    def disturbed(samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits = NO_LIMITS) -> StepResult:
        attempts.append(len(samples))
        if len(attempts) == 2:
            samples = [replace(one, advantages=np.full_like(one.advantages, np.inf)) for one in samples]
        return step(samples, rule, limits)

    learning.backend.step = disturbed
    with pytest.raises(StepDiffered, match="repeated from the same state"):
        learning.update()
    assert len(attempts) == 3, "the second step was made twice"
    report = replayed(config)
    assert [one.recorded_losses is None for one in report.remade] == [False, True], "the second was never made"
    assert report.first_difference is None and np.isfinite(report.remade[1].losses).all()


def test_the_update_in_which_a_learner_ended_can_be_made_again_to_see_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        tmp_path,
        algorithm={"num_minibatches": 1},
        learner={"max_bad_steps": 1, "learning_rate": 1e30, "warmup_updates": 0},
    )
    learning = Learning(config, 1).make(1)
    with pytest.raises(Diverged):
        learning.update()
    assert main([str(config.run_dir)]) == 0
    out = capsys.readouterr().out
    assert "version 2: was never made; now: 1 optimiser steps in a row were not finite" in out
    assert "1 of 1 updates came out" in out


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Let the system refuse, as a full disk does, every byte of a file above so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_log_alone_and_the_next_checkpoint_begins_it_anew(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    learning = Learning(config, 1).make(2).checkpoint()
    learning.make(1)
    open_segment = config.run_dir / "updates" / "000002.epoch-1.log"
    with capture_logs() as logs, no_file_above(open_segment.stat().st_size + 100):
        learning.make(2)
    assert [entry["event"] for entry in logs].count("update_log_stopped") == 1
    learning.make(1).checkpoint().make(2)
    report = replayed(config)
    assert (versions(report), report.num_equal) == ([1, 2, 3, 7, 8], 5)
    assert report.num_unreachable == 0


def test_the_log_stays_within_its_bound_and_replays_from_the_oldest_checkpoint(tmp_path: Path) -> None:
    config = config_of(tmp_path, replay={"keep_mb": 1}, checkpoint={"keep": 2})
    learning = Learning(config, 1)
    for _ in range(4):
        learning.make(1).checkpoint()
    oldest = config.run_dir / "updates" / "000001.epoch-1.log"
    # the log grows over a megabyte
    oldest.write_bytes(oldest.read_bytes() + bytes(1 << 20))
    # when it is begun, those of versions 3 and 4 are there
    learning.make(1).checkpoint()
    assert sorted(path.name[:6] for path in (config.run_dir / "updates").iterdir()) == ["000004", "000005"]
    report = replayed(config)
    assert (versions(report), report.num_equal, report.num_unreachable) == ([5], 1, 1)


def test_a_run_that_records_nothing_has_no_log(tmp_path: Path) -> None:
    config = config_of(tmp_path, replay={"record": False})
    Learning(config, 1).make(1).checkpoint()
    assert not (config.run_dir / "updates").exists()
    with pytest.raises(DataError, match=r"replay\.record"):
        replayed(config)


def test_the_log_holds_no_address_of_a_ledger(tmp_path: Path) -> None:
    config = config_of(tmp_path, ledger={"url": "redis://:secret@host:6379/0"})
    Learning(config, 1).make(1).checkpoint()
    [segment] = read_log(config.run_dir / "updates")
    assert "secret" not in segment.start.config
    assert segment.start.environment["torch"] == torch.__version__


def test_the_log_tells_builds_of_torch_apart_that_are_installed_under_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel of the default index has the version ``2.13.0`` as a distribution, and
    ``2.13.0+cu130`` when imported."""
    monkeypatch.setattr(weights_file, "version", lambda _: "2.13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    config = config_of(tmp_path)
    Learning(config, 1).make(1).checkpoint()
    assert read_log(config.run_dir / "updates")[0].start.environment["torch"] == "2.13.0+cu130"
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert replayed(config).environment == {"torch": ("2.13.0+cu130", "2.13.0+cpu")}


def test_a_tensors_digest_tells_its_bits_its_shape_and_its_type() -> None:
    zero = torch.zeros(2, 3)
    found = [
        weights_file.digest_tensors([("w", tensor)])["w"]
        for tensor in (zero, zero.reshape(3, 2), zero.double(), -zero, zero.to(torch.int32), torch.zeros(0))
    ]
    assert len(set(found)) == len(found)
    one, other = (weights_file.digest_tensors([("w", tensor)]) for tensor in (zero.t(), torch.zeros(3, 2)))
    assert one == other, "how it lies in memory does not matter"
