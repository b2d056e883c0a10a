"""The update log's outcome is written when the version that the update made is digested, in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import RunConfig
from pipeline.ledger.types import Claim
from pipeline.training.update_log.folder import LoggedUpdate, read_log
from pipeline.training.update_log.records import Origin
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.fakes import small_config
from tests.workers.recording import RecordingTraining
from workers.engines.training.seam import StepResult
from workers.learner.policy_update import Prepared, Stepped
from workers.learner.update_recorder import UpdateRecorder

WHO = Incarnation(Role.LEARNER, "learner", 1)


class Recording:
    def __init__(self, folder: Path) -> None:
        self.config = small_config(folder)
        self.recorder = UpdateRecorder(self.config, folder, WHO, RecordingTraining())
        self.recorder.start_log(Origin.START_MODEL, None, 0)
        self._folder = folder / "updates"

    def batch(self, version: int) -> None:
        self.recorder.batch(Claim(f"c{version}", version, ()), (), version + 1, version)

    def outcome(self, version: int, *, applied: bool = True) -> None:
        step = StepResult(applied, 0.5, 1.0, 1e-3, {}, 1)
        self.recorder.outcome(Prepared([], []), Stepped([step], 0.0, 0.0), version + 1, version + applied)

    def digested(self, version: int) -> None:
        self.recorder.digested(version, digests(version))

    @property
    def updates(self) -> list[LoggedUpdate]:
        return [update for segment in read_log(self._folder) for update in segment.updates]

    @property
    def told(self) -> list[tuple[str, dict[str, bytes] | None]]:
        """Claim and digests of each logged update."""
        return [(one.batch.claim, one.outcome.digests if one.outcome else None) for one in self.updates]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Recording]:
    made = Recording(tmp_path)
    yield made
    made.recorder.close()


def digests(version: int) -> dict[str, bytes]:
    return {"weights": b"of version %d" % version}


def test_what_comes_after_an_update_is_logged_behind_its_outcome_which_waits_for_the_digests(log: Recording) -> None:
    log.batch(0)
    log.outcome(0)
    log.batch(1)
    assert log.told == [("c0", None)]
    log.digested(1)
    assert log.told == [("c0", digests(1)), ("c1", None)]
    log.outcome(1)
    log.digested(2)
    assert log.told == [("c0", digests(1)), ("c1", digests(2))]


def test_an_outcome_never_gets_the_digests_of_another_version(log: Recording) -> None:
    log.batch(0)
    log.outcome(0)
    log.digested(0)
    assert log.told == [("c0", None)]
    log.digested(1)
    assert log.told == [("c0", digests(1))]


def test_a_learner_that_dies_before_the_digests_leaves_an_update_without_outcome(log: Recording) -> None:
    log.batch(0)
    log.outcome(0)
    log.batch(1)
    log.recorder.close()
    log.digested(1)
    assert log.told == [("c0", None)]


def test_an_update_without_an_applied_step_has_the_digests_of_the_version_before(log: Recording) -> None:
    log.batch(0)
    log.outcome(0)
    log.batch(1)
    log.outcome(1, applied=False)
    log.batch(1)
    log.digested(1)
    assert log.told == [("c0", digests(1)), ("c1", digests(1)), ("c1", None)]
    assert [one.num_updates for one in log.updates] == [1, 1, 2]


def test_a_cut_comes_behind_the_outcome_of_its_last_update_and_before_the_next_batch(
    log: Recording, tmp_path: Path
) -> None:
    log.batch(0)
    log.outcome(0)
    assert log.recorder.cut() == 2
    log.batch(1)
    (segment,) = read_log(tmp_path / "updates")
    assert not segment.is_whole
    log.digested(1)
    before, after = read_log(tmp_path / "updates")
    assert before.is_whole and before.updates[0].outcome is not None
    assert (after.start.origin, after.start.num_updates, after.start.digests) == (Origin.CONTINUED, 1, digests(1))


def test_settings_that_change_before_the_digests_are_there_are_not_those_of_an_earlier_batch(log: Recording) -> None:
    log.batch(0)
    log.outcome(0)
    log.batch(1)
    log.recorder.apply_settings(_with_rate(log.config, 0.5))
    log.digested(1)
    log.outcome(1)
    log.digested(2)
    log.batch(2)
    assert [one.batch.settings for one in log.updates] == [{}, {}, {"learner.learning_rate": "0.5"}]


def test_a_log_that_failed_begins_anew_with_the_weights_of_its_first_batch(
    log: Recording, tmp_path: Path, monkeypatch: Any
) -> None:
    log.batch(0)
    log.outcome(0)
    log.batch(1)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(28, "no space left on device")

        patch.setattr("pipeline.training.update_log.folder.LogWriter.append", fail)
        log.digested(1)
    log.outcome(1)
    log.digested(2)
    log.batch(2)
    log.outcome(2)
    log.digested(3)
    log.recorder.cut()
    log.batch(3)
    assert log.told == [("c0", None), ("c3", None)]
    start = read_log(tmp_path / "updates")[-1].start
    assert (start.origin, start.num_updates, start.digests) == (Origin.AFTER_FAILURE, 3, digests(3))


def _with_rate(config: RunConfig, rate: float) -> RunConfig:
    return config.model_copy(update={"learner": config.learner.model_copy(update={"learning_rate": rate})})
