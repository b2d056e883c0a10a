"""Claims about the supervisor's hands in versions of code: no processes, a registry in memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from pipeline.config.operations import REWARDS, WORKERS
from pipeline.files.code_copies import CODE_FOLDER, keep_code
from pipeline.fleet.limits import limits_of
from pipeline.fleet.state import Worker, read_once
from pipeline.observability.history import HISTORY_NAME, run_history
from pipeline.observability.settings_changes import read_changes
from pipeline.process.exit_codes import ExitCode, LastError
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.settings_change import SettingsChange, SettingsTaken, after, standing, undoing
from pipeline.supervisor.code_keeper import SPARED_S, CodeKeeper, named_versions
from pipeline.supervisor.fleet_plan import WorkerPhase
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.processes import Processes, worker_command
from pipeline.supervisor.repair_policy import made_escalation
from pipeline.supervisor.rollout import RolloutState
from pipeline.supervisor.settings_keeper import SettingsKeeper
from pipeline.supervisor.standbys import StandbyKind
from protocol.errors import ConfigError
from protocol.headrace import PACKAGES
from protocol.ids import Incarnation, Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.fleet.reported import Reported
from tests.pipeline.observability.rows import update_row
from tests.pipeline.op_config import op_config

ROOT = Path(__file__).parents[3]
ABSENT = "00ff00ff00ff00ff"
KEY = "learner.learning_rate"
ERROR = LastError("LookupError", "of the new code")


class Listed(Processes):
    """Processes that are only a list; those that are stopped stay until a test ends them."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir, worker_command)
        self.there: dict[str, int] = {}
        self.stopped: list[str] = []
        self._last_pid = 100
        self.codes: list[Path | None] = []

    @property
    def pids(self) -> dict[str, int]:
        return self.there

    def go_by(self, code: Path | None) -> bool:
        self.codes.append(code)
        return super().go_by(code)

    def start(self, role: Role, name: str) -> None:
        self._last_pid += 1
        self.there[name] = self._last_pid

    def stop(self, name: str, *, now: bool = False) -> None:
        self.stopped.append(name)


class Desk:
    """A supervisor's hands on a learner and two reward workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = op_config(folder, "fleet.reward=2", "code.canary_pieces=2", "supervisor.max_data_failures=2")
        self.run_dir = self.config.run_dir
        (self.run_dir / "logs").mkdir(parents=True)
        self.processes = Listed(self.run_dir)
        self.counts = {Role.LEARNER: 1, Role.REWARD: 2}
        self.registry = MemoryRegistry()
        self.runs = {"learner": "", "reward-0": "", "reward-1": ""}
        self.reported = Reported()
        """The version of the change's setting that each worker goes by."""
        self.key = REWARDS
        self.waits: dict[str, WaitingFor] = {}
        self.progress = 9
        self.supervise(0.0)
        self.new = self.kept("new")

    def supervise(self, now: float) -> None:
        """Be a supervisor that starts, or takes the processes over that are there."""
        self.escalation = made_escalation(self.config, self.run_dir)
        self.fleet = HostFleet(
            self.config, self.run_dir, worker_command, processes=self.processes, escalation=self.escalation
        )
        for worker in self.processes.there:
            self.fleet.plan.adopt(worker, Role(worker.partition("-")[0]))
        self.follow(now)
        self.settings = SettingsKeeper(self.config, self.run_dir)
        self.keeper = CodeKeeper(self.config, self.run_dir, self.fleet, self.settings)

    def kept(self, name: str) -> str:
        """Return a version of code that is in the run's folder."""
        (self.folder / name).mkdir()
        (self.folder / name / "mine.py").write_text(f"name = {name!r}\n")
        return keep_code(self.folder / name, self.run_dir)

    def damage(self, version: str) -> None:
        (self.run_dir / CODE_FOLDER / version / "mine.py").write_text("changed = True\n")

    def follow(self, now: float) -> None:
        self.fleet.executor.act(self.fleet.plan.want(self.counts, now))
        self.fleet.executor.act(self.fleet.plan.due(now))

    async def change(self, version: str, key: str = REWARDS, *, at_s: float | None = None) -> None:
        self.key, last = key, await self.registry.last_settings_change()
        former = {key: last.holds.get(key, '""') if last else '""'}
        one = after(last, {key: f'"{version}"'}, former, by="ann@a", at_s=time.time() if at_s is None else at_s)
        assert await self.registry.add_settings_change(one)

    async def rolled_back(self) -> SettingsChange | None:
        """Return the last change of the run, if it is a rollback."""
        last = await self.registry.last_settings_change()
        return last if last is not None and last.undoes else None

    async def look(self, now: float, *, is_paused: bool = False) -> list[str]:
        """Return the workers whose drain was ordered."""
        before = len(self.processes.stopped)
        beats = self.beats(now)
        await self.settings.apply_changes(self.registry, beats)
        await self.keeper.poll(self.registry, beats, now, is_paused=is_paused)
        return self.processes.stopped[before:]

    def beats(self, now: float) -> list[Worker]:
        there = [item for item in self.runs.items() if item[0] in self.processes.there]
        beats = self.reported.beats([self._beat(worker, version, now) for worker, version in there], now)
        return read_once(beats, limits_of(self.config))

    def _beat(self, worker: str, version: str, now: float) -> Worker:
        taken = SettingsTaken(code={self.key: version} if version else {})
        role = Role(worker.partition("-")[0])
        return Worker(
            who=Incarnation(role, worker, 1), pid=self.processes.there[worker], host="here", at_s=now,
            started_s=0.0, progress=self.progress, progress_at_s=0.0, turns=int(now * 2) + 1,
            waiting_for=self.waits.get(worker, WaitingFor.INPUT), settings=taken,
        )  # fmt: skip

    def end(self, worker: str, code: int, now: float, error: LastError | None = None) -> None:
        """End a process, and start what is due."""
        pid = self.processes.there.pop(worker)
        self.fleet.record_exit(Exit(worker, Role(worker.partition("-")[0]), pid, code, error), now)
        self.follow(now)

    def renew(self, worker: str, version: str, now: float) -> None:
        """End a drain; the successor goes by a version."""
        self.end(worker, 0, now)
        self.runs[worker] = version

    async def all_new(self, version: str, now: float, key: str = REWARDS) -> None:
        """Bring a version to all workers."""
        await self.change(version, key)
        for second in range(1, 9):
            for worker in await self.look(now + second):
                self.renew(worker, version, now + second)
        assert self.phase_of(key) is RolloutState.WATCHING

    def phase_of(self, key: str = REWARDS) -> RolloutState:
        return self.keeper._versions[key].rollout.phase

    def phase(self, worker: str) -> WorkerPhase:
        return next(one.phase for one in self.fleet.plan.workers if one.name == worker)


@pytest.fixture
async def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_workers_are_drained_one_by_one_and_a_good_version_is_marked(desk: Desk) -> None:
    assert await desk.look(0.0) == []
    await desk.change(desk.new)
    assert await desk.look(1.0) == ["reward-1"]
    assert await desk.look(2.0) == []
    desk.renew("reward-1", desk.new, 3.0)
    assert await desk.look(4.0) == ["reward-0"]
    desk.renew("reward-0", desk.new, 5.0)
    await desk.look(6.0)
    assert not desk.settings.is_settled(1)
    # too few updates before it are known, and nothing holds the run up
    now = 6.0
    while not desk.settings.is_settled(1):
        now += 2.0
        await desk.look(now)
    assert now == pytest.approx(3600.0, abs=10.0)
    assert read_changes(desk.run_dir)[0].is_settled
    assert "learner" not in desk.processes.stopped


async def test_a_canary_that_ends_hopelessly_is_rolled_back_and_the_run_goes_on(desk: Desk) -> None:
    await desk.change(desk.new)
    await desk.look(1.0)
    desk.end("reward-1", 0, 2.0)
    await desk.look(2.5)
    desk.end("reward-1", ExitCode.CONFIG, 3.0, LastError("ConfigError", "no module"))
    assert desk.fleet.plan.failure is None and desk.phase("reward-1") is WorkerPhase.BACKOFF
    await desk.look(3.5)
    last = read_changes(desk.run_dir)[-1]
    assert (last.number, last.sets, last.undoes, last.by) == (2, {REWARDS: '""'}, 1, "supervisor")
    assert last.reason.startswith("reward-1, which used it, ended (config): ")
    # the other one still has the former version: nothing is left to do
    desk.follow(60.0)
    assert await desk.look(61.0) == []
    assert len(await desk.registry.settings_changes()) == 2


async def test_the_end_of_a_worker_with_the_former_version_is_its_own(desk: Desk) -> None:
    await desk.change(desk.new)
    await desk.look(1.0)
    desk.end("reward-0", ExitCode.CONFIG, 2.0)
    assert desk.fleet.plan.failure is not None and desk.fleet.plan.failure.worker == "reward-0"
    assert len(await desk.registry.settings_changes()) == 1


@pytest.mark.parametrize("stage", [RolloutState.CANARY, RolloutState.ROLLING, RolloutState.WATCHING])
@pytest.mark.parametrize(
    ("code", "is_blamed"),
    [
        (ExitCode.FAILURE, True),
        (ExitCode.CONFIG, True),
        (ExitCode.ENGINE, True),
        (-signal.SIGSEGV, True),
        (-signal.SIGKILL, False),
        (-signal.SIGTERM, False),
        (ExitCode.FENCED, False),
        (ExitCode.OK, False),
    ],
)
async def test_a_bad_end_is_the_versions_and_one_by_a_signal_only_that_of_its_canary(
    desk: Desk, stage: RolloutState, code: int, is_blamed: bool
) -> None:
    if stage is RolloutState.WATCHING:
        await desk.all_new(desk.new, 0.0)
    else:
        await desk.change(desk.new)
        await desk.look(1.0)
        desk.progress = 0 if stage is RolloutState.CANARY else 9
        desk.renew("reward-1", desk.new, 2.0)
        await desk.look(3.0)
    assert desk.phase_of() is stage
    desk.end("reward-1", code, 20.0, ERROR if code > 0 else None)
    await desk.look(20.5)
    by_its_canary = stage is RolloutState.CANARY and code < 0
    undone = await desk.rolled_back()
    assert (undone is not None) is (is_blamed or by_its_canary)
    if undone is not None:
        assert undone.reason.startswith("reward-1, which used it, ended (")
    if is_blamed:
        assert desk.fleet.plan.failure is None and desk.phase("reward-1") is WorkerPhase.BACKOFF


@pytest.mark.parametrize("worker", ["learner", "reward-1"])
async def test_new_code_that_makes_a_worker_stand_still_is_rolled_back_and_the_run_goes_on(
    desk: Desk, worker: str
) -> None:
    await desk.all_new(desk.new, 0.0, WORKERS)
    plan = desk.fleet.plan
    # the learner stood still at this checkpoint before, so that once more would end the run
    next(one for one in plan.workers if one.name == "learner").stuck_with = ""
    desk.waits[worker] = WaitingFor.COMPUTE
    desk.processes.stopped.clear()
    now = 9.0
    while not desk.processes.stopped:
        now += 1.0
        await desk.fleet.replace(desk.registry, desk.fleet.watchdog.fleet.read(desk.beats(now), now), now)
        await desk.look(now, is_paused=True)
    assert desk.processes.stopped == [worker] and plan.failure is None
    undone = await desk.rolled_back()
    assert undone is not None and undone.sets == {WORKERS: '""'}
    assert undone.reason.startswith(f"{worker}, which used it, was stuck: at compute without progress for 6")
    # its end is no loss of its own, and the next one starts by the former code
    assert desk.processes.codes[-1] is None
    desk.end(worker, -signal.SIGKILL, now)
    assert plan.failure is None and desk.phase(worker) is WorkerPhase.BACKOFF
    assert desk.escalation.cases == ()


async def test_a_worker_that_never_starts_by_new_code_fails_it_in_every_stage(desk: Desk) -> None:
    await desk.change(desk.new)
    await desk.look(1.0)
    desk.renew("reward-1", desk.new, 2.0)
    assert await desk.look(3.0) == ["reward-0"]
    desk.end("reward-0", 0, 4.0)
    del desk.runs["reward-0"]
    for now in range(5, 310):
        await desk.fleet.replace(desk.registry, desk.fleet.watchdog.fleet.read(desk.beats(now), float(now)), float(now))
        await desk.look(now + 0.1)
    undone = await desk.rolled_back()
    assert undone is not None
    assert undone.reason.startswith("reward-0, which used it, was stuck: not started after 30")


async def test_a_worker_that_is_frozen_from_outside_is_no_fault_of_the_code(desk: Desk) -> None:
    await desk.all_new(desk.new, 0.0)
    beats = desk.beats(10.0)
    for now in range(10, 40):
        beats = [*desk.beats(now)[:2], msgspec.structs.replace(beats[2], silent_s=now - 10.0)]
        await desk.fleet.replace(desk.registry, desk.fleet.watchdog.fleet.read(beats, float(now)), float(now))
    assert desk.processes.stopped[-1] == "reward-1"
    desk.end("reward-1", -signal.SIGKILL, 41.0)
    await desk.look(42.0)
    assert await desk.rolled_back() is None


async def test_the_limit_of_a_replacement_is_that_of_a_restart_and_begins_with_each_sign(desk: Desk) -> None:
    """Of 6 minutes, not of the hour that a drain may take in all."""
    await desk.change(desk.new)
    await desk.look(1.0)
    for second in range(1, 1000):
        assert await desk.look(1.0 + second) == [], "it drains, by limits of its own"
    desk.renew("reward-1", desk.new, 1000.0)
    desk.waits["reward-1"] = WaitingFor.STARTING
    for second in range(1000, 1350):
        await desk.look(float(second))
    desk.progress += 1
    for second in range(1350, 1705):
        await desk.look(float(second))
    assert desk.phase_of() is RolloutState.CANARY
    for second in range(1705, 1712):
        await desk.look(float(second))
    undone = await desk.rolled_back()
    assert undone is not None and undone.reason == "reward-1 did not start with it: there was no sign of life for 360 s"


@pytest.mark.parametrize("reason", ["pause", "start", "endpoint", "disk", "compile", "nothing"])
async def test_time_counts_against_a_version_only_while_nothing_else_holds_the_run_up(desk: Desk, reason: str) -> None:
    made_s = time.time()
    rows = [replace(update_row(number), at_s=made_s - 60.0 + number) for number in range(60)]
    history = run_history(desk.run_dir / HISTORY_NAME)
    for one in rows:
        history.append(one)
    await desk.all_new(desk.new, 0.0)
    waits = {"start": WaitingFor.STARTING, "endpoint": WaitingFor.ENDPOINT, "disk": WaitingFor.DISK}
    if reason in waits or reason == "compile":
        # also a worker that the version does not concern
        desk.waits["learner"] = waits.get(reason, WaitingFor.COMPILE)
    for now in range(10, 80):
        await desk.look(float(now), is_paused=reason == "pause")
    undone = await desk.rolled_back()
    assert (undone is not None) is (reason == "nothing")
    if undone is not None:
        assert "0 of 9 in 6" in undone.reason


async def test_a_new_supervisor_goes_on_with_a_version_that_some_workers_have(desk: Desk) -> None:
    await desk.change(desk.new)
    await desk.look(1.0)
    desk.renew("reward-1", desk.new, 2.0)
    desk.supervise(3.0)
    # the worker that has it is its canary, and is not replaced again
    assert await desk.look(4.0) == ["reward-0"]
    desk.renew("reward-0", desk.new, 5.0)
    await desk.look(6.0)
    assert desk.phase_of() is RolloutState.WATCHING
    # a bad end of an adopted worker with the version is the version's
    desk.end("reward-1", ExitCode.FAILURE, 7.0, ERROR)
    await desk.look(7.5)
    assert (undone := await desk.rolled_back()) is not None and undone.sets == {REWARDS: '""'}


async def test_a_rollback_by_hand_takes_all_workers_back_at_once(desk: Desk) -> None:
    await desk.change(desk.new)
    await desk.look(1.0)
    for worker in ("reward-0", "reward-1"):
        desk.runs[worker] = desk.new
    changes = await desk.registry.settings_changes()
    assert await desk.registry.add_settings_change(undoing(changes, changes, by="ann@a", at_s=2.0))
    desk.processes.stopped.clear()
    desk.end("reward-1", 0, 2.0)
    assert await desk.look(3.0) == ["reward-0", "reward-1"]


async def test_a_rollback_of_an_earlier_version_leaves_its_successor_on_trial(desk: Desk) -> None:
    first, second = desk.new, desk.kept("second")
    await desk.change(first)
    await desk.look(1.0)
    await desk.change(second)
    changes = await desk.registry.settings_changes()
    assert await desk.registry.add_settings_change(undoing(changes, changes[:1], by="reward-1", at_s=2.0))
    desk.end("reward-1", 0, 2.0)
    desk.runs["reward-1"] = ""
    assert await desk.look(3.0) == ["reward-1"], "one alone"
    held = desk.keeper._versions[REWARDS]
    assert (held.value, held.change.number, held.rollout.phase) == (second, 2, RolloutState.CANARY)


class Refuses:
    """A registry's lack of an answer to new changes: another one comes first."""

    async def __call__(self, *_: object) -> bool:
        return False


async def test_a_failed_rollback_is_tried_again_until_another_change_holds(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.change(desk.new)
    await desk.look(1.0)
    desk.end("reward-1", 0, 2.0)
    desk.end("reward-1", ExitCode.FAILURE, 3.0)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryRegistry, "add_settings_change", Refuses())
        await desk.look(3.5)
    assert len(await desk.registry.settings_changes()) == 1
    await desk.look(4.0)
    assert (await desk.registry.settings_changes())[-1].undoes == 1


async def test_a_rollback_that_waits_holds_up_no_other_version(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.change(desk.new)
    await desk.look(1.0)
    desk.end("reward-1", 0, 2.0)
    await desk.look(2.5)
    desk.end("reward-1", ExitCode.FAILURE, 3.0, ERROR)
    await desk.change(desk.kept("workers"), WORKERS)
    desk.follow(60.0)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryRegistry, "add_settings_change", Refuses())
        assert await desk.look(61.0) == ["reward-1"], "the canary of the other one"


@pytest.mark.parametrize("key", [REWARDS, WORKERS])
async def test_a_way_back_to_a_damaged_version_goes_on_to_a_whole_one(desk: Desk, key: str) -> None:
    whole, damaged, bad = desk.kept("whole"), desk.kept("damaged"), desk.kept("bad")
    for version in (whole, damaged):
        await desk.change(version, key)
    desk.runs = dict.fromkeys(desk.runs, damaged)
    await desk.look(1.0)
    await desk.change("0.5", KEY)
    await desk.change(bad, key)
    assert await desk.look(2.0) == ["reward-1"]
    desk.damage(damaged)
    desk.renew("reward-1", bad, 3.0)
    desk.end("reward-1", ExitCode.FAILURE, 4.0, ERROR)
    await desk.look(5.0)
    changes = await desk.registry.settings_changes()
    assert [(one.sets[key], one.undone) for one in changes[-2:]] == [(f'"{damaged}"', (4,)), (f'"{whole}"', (4,))]
    assert "mine.py was changed" in changes[-1].reason and changes[-1].by == "supervisor"
    assert [one.number for one in standing(changes)] == [1, 2, 3], "no other change is undone by that"
    assert read_changes(desk.run_dir)[-1].number == changes[-1].number, "before a worker starts again"
    # the others go back to it at once, since it is on no trial
    assert await desk.look(6.0) == (["learner", "reward-0"] if key == WORKERS else ["reward-0"])
    assert desk.keeper._versions[key].value == whole
    if key == WORKERS:
        assert desk.processes.codes[-1] == desk.run_dir / CODE_FOLDER / whole


async def test_a_way_back_without_a_whole_version_ends_at_the_installed_code(desk: Desk) -> None:
    await desk.change(desk.new, WORKERS)
    await desk.look(1.0)
    await desk.change(desk.kept("bad"), WORKERS)
    await desk.look(2.0)
    desk.damage(desk.new)
    changes = await desk.registry.settings_changes()
    assert await desk.registry.add_settings_change(undoing(changes, changes[1:], by="ann@a", at_s=2.0))
    await desk.look(3.0)
    last = (await desk.registry.settings_changes())[-1]
    assert (last.sets, last.former) == ({WORKERS: '""'}, {WORKERS: f'"{desk.new}"'})
    assert desk.processes.codes[-1] is None
    assert await desk.look(4.0) == [] and len(await desk.registry.settings_changes()) == 4


async def test_code_of_the_workers_concerns_every_role_and_one_of_many_tries_it_first(desk: Desk) -> None:
    await desk.change(desk.new, WORKERS)
    assert await desk.look(1.0) == ["reward-1"]
    assert desk.processes.codes == [desk.run_dir / CODE_FOLDER / desk.new]
    desk.end("reward-1", 0, 2.0)
    held = desk.keeper._versions[WORKERS]
    assert set(desk.keeper._workers(held, [], 2.0)) == {"learner", "reward-0", "reward-1"}
    # its bad end is the version's, and a restart goes by the former one
    desk.end("reward-1", ExitCode.FAILURE, 3.0)
    await desk.look(3.5)
    assert (await desk.registry.settings_changes())[-1].sets == {WORKERS: '""'}
    assert desk.processes.codes[-1] is None, "before the next start"


@pytest.mark.parametrize("key", [REWARDS, WORKERS])
async def test_code_that_was_changed_since_its_check_starts_no_worker(desk: Desk, key: str) -> None:
    desk.damage(desk.new)
    await desk.change(desk.new, key)
    assert await desk.look(1.0) == [] and set(desk.processes.codes) <= {None}
    last = (await desk.registry.settings_changes())[-1]
    assert last.undoes == 1 and "mine.py was changed" in last.reason


async def test_versions_that_no_change_names_are_removed_once_nothing_is_on_its_way(desk: Desk) -> None:
    unnamed = desk.kept("unnamed")
    old_s = time.time() - 2 * SPARED_S
    for version in (unnamed, desk.new):
        os.utime(desk.run_dir / CODE_FOLDER / f"{version}.json", (old_s, old_s))
    await desk.change(desk.new)
    await desk.look(1.0)
    assert (desk.run_dir / CODE_FOLDER / unnamed).exists(), "workers may still go by it"
    await desk.settings.settle(desk.registry, 1)
    await desk.look(2.0)
    assert not (desk.run_dir / CODE_FOLDER / unnamed).exists()
    assert (desk.run_dir / CODE_FOLDER / desk.new).exists()


async def test_a_start_of_the_run_goes_by_the_version_that_holds_or_is_refused(desk: Desk) -> None:
    version = keep_code(ROOT, desk.run_dir, PACKAGES)
    await desk.keeper.begin("")
    assert desk.processes.codes == []
    await desk.keeper.begin(version)
    assert desk.processes.codes == [desk.run_dir / CODE_FOLDER / version]
    with pytest.raises(ConfigError, match="version 00ff00ff00ff00ff of the code is not in"):
        await desk.keeper.begin(ABSENT)


async def test_a_start_whose_headrace_shares_other_code_than_the_version_is_refused(desk: Desk, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / "new" / package).mkdir(parents=True)
        (tmp_path / "new" / package / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match=r"differs from this Headrace in pipeline/files/records\.py"):
        await desk.keeper.begin(keep_code(tmp_path / "new", desk.run_dir, PACKAGES))
    assert desk.processes.codes == []


async def test_standbys_of_the_former_code_become_no_workers(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    config = op_config(tmp_path / "other")
    fleet = HostFleet(config, desk.run_dir, worker_command, processes=desk.processes, standbys=True)
    assert fleet.standbys is not None
    pool = fleet.standbys._pool
    pool.want({StandbyKind.GENERIC: 1})
    (begun,) = pool.tick(0.0)
    pool.reported(1.0, begun.worker, frozenset({Role.REWARD}), None)
    fleet.go_by(None)
    assert fleet.standbys.roles == {Role.REWARD}
    fleet.go_by(tmp_path)
    assert fleet.standbys.roles == frozenset()


def made(*steps: tuple[str, str]) -> list[SettingsChange]:
    changes: list[SettingsChange] = []
    for key, value in steps:
        last = changes[-1] if changes else None
        former = last.holds.get(key, '""') if last else '""'
        changes.append(after(last, {key: f'"{value}"'}, {key: former}, by="ann@a", at_s=1.0))
    return changes


def test_versions_that_hold_come_first_then_those_of_standing_changes() -> None:
    changes = made((REWARDS, "a"), (WORKERS, "w"), (REWARDS, "b"), (KEY, "0.5"), (REWARDS, "c"), (REWARDS, "d"))
    assert named_versions(changes) == ["d", "w", "c", "b", "a"]
    back = [*changes, undoing(changes, changes[-1:], by="reward-1", at_s=2.0)]
    assert named_versions(back) == ["c", "w", "b", "a"], "one that was rolled back is not gone back to"
    assert named_versions([]) == []
