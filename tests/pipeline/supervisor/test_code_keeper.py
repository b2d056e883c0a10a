"""Claims about the supervisor's hands in versions of code: no processes, a registry in memory."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from pipeline.config.code import REWARDS, WORKERS
from pipeline.files.code_copies import CODE_FOLDER, keep_code
from pipeline.observability.settings_changes import read_changes
from pipeline.process.exit_codes import ExitCode
from pipeline.process.last_error import LastError
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.runtime.registry.settings_change import SettingsTaken, after
from pipeline.supervisor.code_keeper import CodeKeeper
from pipeline.supervisor.fleet_plan import WorkerPhase
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.processes import Processes, worker_command
from pipeline.supervisor.settings_keeper import SettingsKeeper
from pipeline.supervisor.standbys.pool import StandbyKind
from protocol.errors import ConfigError
from protocol.headrace import PACKAGES
from protocol.ids import Incarnation, Role
from tests.pipeline.op_config import op_config

ROOT = Path(__file__).parents[3]
OLD, NEW = "", "00ff00ff00ff00ff"


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
    def __init__(self, folder: Path) -> None:
        config = op_config(folder, "fleet.reward=2", "code.canary_pieces=2", "supervisor.max_data_failures=2")
        self.run_dir = config.run_dir
        (self.run_dir / "logs").mkdir(parents=True)
        self.processes = Listed(self.run_dir)
        self.fleet = HostFleet(config, self.run_dir, worker_command, processes=self.processes)
        self.counts = {Role.LEARNER: 1, Role.REWARD: 2}
        self.follow(0.0)
        self.registry = MemoryRegistry()
        self.settings = SettingsKeeper(config, self.run_dir)
        self.keeper = CodeKeeper(config, self.run_dir, self.fleet, self.settings)
        self.runs = dict.fromkeys(("reward-0", "reward-1"), OLD)

    def follow(self, now: float) -> None:
        self.fleet.carry_out(self.fleet.plan.want(self.counts, now))
        self.fleet.carry_out(self.fleet.plan.due(now))

    async def change(self, version: str = NEW, key: str = REWARDS) -> None:
        last = await self.registry.last_settings_change()
        one = after(last, {key: f'"{version}"'}, {key: '""'}, by="ann@a", at_s=time.time())
        assert await self.registry.add_settings_change(one)

    async def look(self, now: float) -> list[str]:
        """Return the workers whose drain was ordered."""
        before = len(self.processes.stopped)
        beats = [self._beat(worker, version) for worker, version in self.runs.items() if worker in self.processes.there]
        await self.settings.keep(self.registry, beats)
        await self.keeper.look(self.registry, beats, now)
        return self.processes.stopped[before:]

    def _beat(self, worker: str, version: str) -> Heartbeat:
        taken = SettingsTaken(code={REWARDS: version} if version else {})
        return Heartbeat(
            who=Incarnation(Role.REWARD, worker, 1), pid=self.processes.there[worker], host="here", at_s=0.0,
            started_s=0.0, progress=9, progress_at_s=0.0, waiting_for=WaitingFor.INPUT, settings=taken,
        )  # fmt: skip

    def end(self, worker: str, code: int, now: float, error: LastError | None = None) -> None:
        """End a process, and start what is due."""
        pid = self.processes.there.pop(worker)
        self.fleet.note(Exit(worker, Role.REWARD, pid, code, error), now)
        self.follow(now)

    def phase(self, worker: str) -> WorkerPhase:
        return next(one.phase for one in self.fleet.plan.workers if one.name == worker)


@pytest.fixture
async def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_workers_are_drained_one_by_one_and_a_good_version_is_marked(desk: Desk) -> None:
    assert await desk.look(0.0) == []
    await desk.change()
    assert await desk.look(1.0) == ["reward-1"]
    assert await desk.look(2.0) == []
    desk.end("reward-1", 0, 3.0)
    desk.runs["reward-1"] = NEW
    assert await desk.look(4.0) == ["reward-0"]
    desk.end("reward-0", 0, 5.0)
    desk.runs["reward-0"] = NEW
    await desk.look(6.0)
    assert not desk.settings.is_settled(1)
    (desk.run_dir / "history.jsonl").write_bytes(b"")
    await desk.look(7.0)
    version = desk.keeper._versions[REWARDS]
    version.rollout._complete_s = 0.0
    await desk.look(8.0)
    assert desk.settings.is_settled(1) and read_changes(desk.run_dir)[0].is_settled
    assert "learner" not in desk.processes.stopped


async def test_a_canary_that_ends_hopelessly_is_rolled_back_and_the_run_goes_on(desk: Desk) -> None:
    await desk.change()
    await desk.look(1.0)
    desk.end("reward-1", 0, 2.0)
    await desk.look(2.5)
    desk.end("reward-1", ExitCode.CONFIG, 3.0, LastError("ConfigError", "no module"))
    assert desk.fleet.plan.failure is None and desk.phase("reward-1") is WorkerPhase.BACKOFF
    await desk.look(3.5)
    last = read_changes(desk.run_dir)[-1]
    assert (last.number, last.sets, last.undoes, last.by) == (2, {REWARDS: '""'}, 1, "supervisor")
    assert last.reason.startswith("reward-1, which went by it, ended (config): ")
    # the other one still has the former version: nothing is left to do
    desk.follow(60.0)
    assert await desk.look(61.0) == []
    assert len(await desk.registry.settings_changes()) == 2


async def test_the_end_of_a_worker_with_the_former_version_is_its_own(desk: Desk) -> None:
    await desk.change()
    await desk.look(1.0)
    desk.end("reward-0", ExitCode.CONFIG, 2.0)
    assert desk.fleet.plan.failure is not None and desk.fleet.plan.failure.worker == "reward-0"
    assert len(await desk.registry.settings_changes()) == 1


async def test_a_rollback_by_hand_takes_all_workers_back_at_once(desk: Desk) -> None:
    await desk.change()
    await desk.look(1.0)
    for worker in ("reward-0", "reward-1"):
        desk.runs[worker] = NEW
    changes = await desk.registry.settings_changes()
    undone = msgspec.structs.replace(
        after(changes[-1], {REWARDS: '""'}, {REWARDS: NEW}, by="ann@a", at_s=2.0), undoes=1
    )
    assert await desk.registry.add_settings_change(undone)
    desk.processes.stopped.clear()
    desk.end("reward-1", 0, 2.0)
    assert await desk.look(3.0) == ["reward-0", "reward-1"]


async def test_a_failed_rollback_is_tried_again_until_another_change_holds(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.change()
    await desk.look(1.0)
    desk.end("reward-1", 0, 2.0)
    desk.end("reward-1", ExitCode.FAILURE, 3.0)

    async def refuses(*_: object) -> bool:
        return False

    with monkeypatch.context() as patch:
        patch.setattr(MemoryRegistry, "add_settings_change", refuses)
        await desk.look(3.5)
    assert len(await desk.registry.settings_changes()) == 1
    await desk.look(4.0)
    assert (await desk.registry.settings_changes())[-1].undoes == 1


def kept(desk: Desk, tmp_path: Path) -> str:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "workers.py").write_text("")
    return keep_code(tmp_path / "new", desk.run_dir)


async def test_code_of_the_workers_concerns_every_role_and_one_of_many_tries_it_first(
    desk: Desk, tmp_path: Path
) -> None:
    version = kept(desk, tmp_path)
    await desk.change(version, WORKERS)
    assert await desk.look(1.0) == ["reward-1"]
    assert desk.processes.codes == [desk.run_dir / CODE_FOLDER / version]
    desk.end("reward-1", 0, 2.0)
    held = desk.keeper._versions[WORKERS]
    assert set(desk.keeper._workers(held, [])) == {"learner", "reward-0", "reward-1"}
    # its bad end is the version's, and a restart goes by the former one
    desk.end("reward-1", ExitCode.FAILURE, 3.0)
    await desk.look(3.5)
    assert (await desk.registry.settings_changes())[-1].sets == {WORKERS: '""'}
    await desk.look(4.0)
    assert desk.processes.codes[-1] is None


async def test_code_of_the_workers_that_was_changed_since_its_check_starts_none(desk: Desk, tmp_path: Path) -> None:
    version = kept(desk, tmp_path)
    (desk.run_dir / CODE_FOLDER / version / "workers.py").write_text("changed = True\n")
    await desk.change(version, WORKERS)
    assert await desk.look(1.0) == [] and desk.processes.codes == []
    last = (await desk.registry.settings_changes())[-1]
    assert last.undoes == 1 and "workers.py was changed" in last.reason


async def test_a_start_of_the_run_goes_by_the_version_that_holds_or_is_refused(desk: Desk) -> None:
    version = keep_code(ROOT, desk.run_dir, PACKAGES)
    await desk.keeper.begin("")
    assert desk.processes.codes == []
    await desk.keeper.begin(version)
    assert desk.processes.codes == [desk.run_dir / CODE_FOLDER / version]
    with pytest.raises(ConfigError, match="version 00ff00ff00ff00ff of the code is not in"):
        await desk.keeper.begin(NEW)


async def test_a_start_whose_headrace_shares_other_code_than_the_version_is_refused(desk: Desk, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / "new" / package).mkdir(parents=True)
        (tmp_path / "new" / package / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match="has other code in pipeline/ledger than this Headrace"):
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
    pool.reported(1.0, begun.name, frozenset({Role.REWARD}), None)
    fleet.go_by(None)
    assert fleet.standbys.roles == {Role.REWARD}
    fleet.go_by(tmp_path)
    assert fleet.standbys.roles == frozenset()
