"""Claims about repairs of a supervised run: real processes, a real registry, and the record."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from pipeline.fleet.incidents.book import IncidentBook, Suspicion
from pipeline.fleet.incidents.records import IncidentRecord, IncidentStep, incident_records
from pipeline.fleet.limits import Limits
from pipeline.fleet.repair.records import StepRow, read_repairs, read_steps
from pipeline.fleet.state import Worker, read_once
from pipeline.fleet.status import RunSnapshot
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import Fleet, RunState, WaitingFor
from pipeline.runtime.registry.entries import CheckDigests, Vitals
from pipeline.runtime.registry.settings_change import after
from pipeline.supervisor.code_keeper import CodeKeeper
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.processes import worker_command
from pipeline.supervisor.repair_policy import RepairPolicy, made_escalation
from pipeline.supervisor.settings_keeper import SettingsKeeper
from protocol.errors import LedgerUnavailable
from protocol.ids import Incarnation, Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.supervised import Run

pytestmark = pytest.mark.timeout(90)
ONE_OF_TWO = ("fleet.generator=2", "supervisor.max_data_failures=2")


def steps(run: Run, level: str, outcome: str) -> list[StepRow]:
    return [row for row in read_steps(run.run_dir) if (row.rung, row.outcome) == (level, outcome)]


def breaking(run: Run) -> None:
    """Break generator-1 once both generators work; end the run when it was evicted and is gone."""
    broken: list[int] = []

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.workers if beat.progress > 0}
        if not broken and {"generator-0", "generator-1"} <= pids.keys():
            broken.append(pids["generator-0"])
            (run.run_dir / "break-generator-1").touch()
        elif broken and steps(run, "evict", "begun") and "generator-1" not in snapshot.absent:
            assert pids["generator-0"] == broken[0], "the healthy one was left alone"
            run.interrupt(snapshot)

    run.react = react


def test_a_worker_that_breaks_at_each_start_is_evicted_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, *ONE_OF_TWO, generator="breaks")
    breaking(run)
    outcome = run.until_end()
    assert (outcome.exit_code, outcome.status.state) == (ExitCode.OK, RunState.STOPPING)
    (evicted,) = steps(run, "evict", "begun")
    assert evicted.worker == "generator-1" and evicted.role == "generator" and evicted.case == 1
    assert (
        "ValueError: this one is broken" in evicted.sentence
        and "`headrace fleet readmit generator-1`" in evicted.sentence
    )
    (failed,) = steps(run, "restart", "failed")
    assert "ended twice by the same error" in failed.sentence
    assert made_escalation(run.config, run.run_dir)._next == 2, "the next supervisor's cases have other numbers"


def test_under_advice_the_run_ends_as_ever_and_the_record_has_what_would_be_done(tmp_path: Path) -> None:
    run = Run(tmp_path, *ONE_OF_TWO, "recovery.policy=advise", generator="breaks")
    breaking(run)
    outcome = run.until_end()
    assert (outcome.exit_code, outcome.status.state) == (ExitCode.CONFIG, RunState.FAILED)
    assert "generator-1 ended twice by the same error" in outcome.status.detail
    (advised,) = steps(run, "evict", "advised")
    assert advised.worker == "generator-1" and not steps(run, "evict", "begun")


@pytest.mark.parametrize(("policy", "is_restarted"), [("act", True), ("own_signs", False)])
def test_an_incident_restarts_its_worker_only_where_the_policy_says_so(
    tmp_path: Path, policy: str, is_restarted: bool
) -> None:
    run = Run(
        tmp_path, "fleet.generator=2", "observer.enabled=true", f"recovery.policy={policy}", "recovery.tolerate_s=0.5",
        generator="busy",
    )  # fmt: skip
    first: dict[str, int] = {}

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.workers}
        if not first and {"generator-1", "observer", "learner"} <= pids.keys():
            first.update(pids)
            record = IncidentRecord(
                number=7, step=IncidentStep.OPENED, at_s=time.time() + 60.0, component="generator-1", kind="hung",
                sentence="no progress for 9 s",
            )  # fmt: skip
            incident_records(run.run_dir).append(record)
        is_done = is_restarted and bool(read_repairs(run.run_dir)[0])
        if first and (is_done or (not is_restarted and steps(run, "restart", "advised"))):
            assert {name: pid for name, pid in pids.items() if name != "generator-1"}.items() <= first.items()
            assert (pids["generator-1"] != first["generator-1"]) is is_restarted
            run.interrupt(snapshot)

    run.react = react
    assert run.until_end().exit_code == ExitCode.OK
    (begun,) = steps(run, "tolerate", "begun")
    assert begun.sentence == "incident 7: generator-1 is hung: no progress for 9 s"
    assert [len(steps(run, level, "begun")) for level in ("isolate", "restart")] == [is_restarted] * 2
    repairs, _ = read_repairs(run.run_dir)
    assert [(row.worker, row.cause) for row in repairs] == [("generator-1", begun.sentence)] * is_restarted
    assert all(row.detect_s > 0.0 and row.localise_s >= 0.5 for row in repairs)


def test_a_fault_that_passes_is_left_alone_under_act_though_its_incident_is_open(tmp_path: Path) -> None:
    run = Run(
        tmp_path, "fleet.generator=2", "observer.enabled=true", "recovery.policy=act", "recovery.tolerate_s=4",
        generator="busy",
    )  # fmt: skip
    book, file = IncidentBook(), incident_records(run.run_dir)
    first: dict[str, int] = {}
    begun_s: list[float] = []

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.workers}
        if not first and {"generator-1", "observer", "learner"} <= pids.keys():
            first.update(pids)
            begun_s.append(time.time())
        if not first:
            return
        now_s = time.time()
        is_found = now_s - begun_s[0] < 1.0
        file.append(*book.update(now_s, [Suspicion("generator-1", "hung", now_s, "no progress")] if is_found else []))
        if now_s - begun_s[0] > 8.0:
            assert book.open, "it ends only when all was calm for long"
            assert pids == first
            run.interrupt(snapshot)

    run.react = react
    assert run.until_end().exit_code == ExitCode.OK
    assert steps(run, "tolerate", "begun") and not steps(run, "restart", "begun")


# -- its hands, without processes ------------------------------------------------------------------


class Desk:
    """A repair policy, a plan without processes, and a registry in memory."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        config = op_config(folder, "fleet.generator=2", *overrides)
        self.run_dir = config.run_dir
        self.run_dir.mkdir(parents=True)
        self.escalation = made_escalation(config, self.run_dir)
        self.fleet = HostFleet(config, self.run_dir, worker_command, escalation=self.escalation)
        self.fleet.plan.want({Role.LEARNER: 1, Role.GENERATOR: 2}, 0.0)
        self.registry = MemoryRegistry()
        self.settings = SettingsKeeper(config, self.run_dir)
        self.code = CodeKeeper(config, self.run_dir, self.fleet, self.settings)
        self.repairing = RepairPolicy(self.escalation, self.fleet, self.run_dir, self.code)

    async def look(self, now: float, *beats: Worker) -> list[tuple[str, str]]:
        await self.code.poll(self.registry, beats, now)
        await self.repairing.poll(self.registry, beats, now)
        return [(row.rung, row.outcome) for row in read_steps(self.run_dir)]


def beat(worker: str, waiting_for: WaitingFor = WaitingFor.COMPUTE, progress: int = 1, host: str = "here") -> Worker:
    who = Incarnation(Role(worker.partition("-")[0]), worker, 1)
    times = {"at_s": 0.0, "started_s": 0.0, "progress_at_s": 0.0}
    return Worker(who=who, pid=1, host=host, progress=progress, waiting_for=waiting_for, **times)  # type: ignore[arg-type]


async def test_a_worker_that_waits_for_work_again_is_repaired(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    for worker in ("learner", "generator-0"):
        desk.escalation.lost(0.0, worker, Role(worker.partition("-")[0]), "killed")
        desk.escalation.started(1.0, worker)
    signs = beat("learner", WaitingFor.COMPUTE, 0), beat("generator-0", WaitingFor.CREDIT, 0)
    await desk.look(2.0, *signs)
    assert (await desk.look(33.0, *signs))[-1] == ("restart", "done")
    assert [case.worker for case in desk.escalation.cases] == ["learner"]


async def test_the_time_for_which_an_incident_was_found_counts_when_it_is_found_again(tmp_path: Path) -> None:
    desk, book = Desk(tmp_path, "recovery.policy=act"), IncidentBook()
    file, begun_s = incident_records(desk.run_dir), time.time() + 1.0
    observer = beat("observer")
    for second in range(14):
        is_found = second <= 8 or second >= 12
        suspicions = [Suspicion("generator-1", "hung", begun_s, "no progress")] if is_found else []
        file.append(*book.update(begun_s + second, suspicions))
        steps = await desk.look(100.0 + second, beat("generator-0"), beat("generator-1"), observer)
        assert ("restart", "begun") not in steps
    # eight seconds and two, of ten
    assert ("restart", "begun") in await desk.look(114.0, beat("generator-0"), beat("generator-1"), observer)


async def test_without_its_observer_an_incident_restarts_no_worker(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "recovery.policy=act")
    found = [Suspicion("generator-1", "hung", time.time(), "no progress")]
    incident_records(desk.run_dir).append(*IncidentBook().update(time.time() + 1.0, found))
    generators = beat("generator-0"), beat("generator-1")
    await desk.look(99.0, *generators, beat("observer"))
    assert ("tolerate", "begun") in await desk.look(100.0, *generators, beat("observer"))
    for second in range(101, 140):
        await desk.look(float(second), *generators)
    assert ("restart", "begun") not in await desk.look(148.9, *generators, beat("observer"))
    assert ("restart", "begun") in await desk.look(149.0, *generators, beat("observer"))


async def test_the_last_level_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "recovery.restart_timeout_s=10")
    desk.escalation.lost(0.0, "learner", Role.LEARNER, "killed")
    for now in (1.0, 11.0, 21.0):
        assert desk.fleet.plan.failure is None
        taken = await desk.look(now)
    assert taken[-1] == ("whole_run", "begun")
    failure = desk.fleet.plan.failure
    assert failure is not None and (failure.worker, failure.exit_code) == ("learner", ExitCode.STUCK)
    assert failure.reason.startswith("does not come back: no work within 10 s of its last sign")


async def test_an_eviction_that_the_registry_did_not_take_is_made_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    await desk.registry.set_fleet(Fleet({Role.LEARNER: 1, Role.GENERATOR: 2}))
    peer = beat("generator-hostc-x-0", host="hostc")
    await desk.look(0.0, peer)
    assert desk.escalation.exhausted(1.0, "generator-1", Role.GENERATOR, "is given up", is_its_own=True)

    async def is_away(*_: object) -> bool:
        raise LedgerUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryRegistry, "replace_fleet", is_away)
        with pytest.raises(LedgerUnavailable):
            await desk.look(2.0, peer)
    await desk.look(3.0, peer)
    fleet = await desk.registry.fleet()
    assert fleet is not None and fleet.counts[Role.GENERATOR] == 1
    assert [(one.worker, one.by, one.reason) for one in fleet.evictions] == [
        ("generator-1", "supervisor", "is given up")
    ]
    assert await desk.registry.epoch("generator-1") == 1, "fenced"
    await desk.look(4.0, peer)
    assert (await desk.registry.fleet()) == fleet, "once"


class JoinedDesk(Desk):
    """A desk that acts on incidents, with workers of joined hosts whose heartbeats are the
    registry's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "recovery.policy=act")
        self.writer = self.registry.writer()
        self.file = incident_records(self.run_dir)

    async def start(self, name: str, host: str, *gpus: str) -> None:
        who = await self.registry.register(Role.GENERATOR, name)
        vitals = Vitals(gpus=gpus) if gpus else None
        self.writer.beat(msgspec.structs.replace(beat(name, host=host), who=who, vitals=vitals))

    async def answer(self, name: str, tokens: str) -> None:
        """Answer the newest self-check."""
        fleet = await self.registry.fleet()
        assert fleet is not None
        check = CheckDigests(number=fleet.check, policy_version=4, tokens=tokens)
        (last,) = await self.registry.heartbeats_of([name])
        self.writer.beat(msgspec.structs.replace(last, check=check))

    def find(self, number: int, name: str, kind: str = "hung") -> None:
        """Open an incident that stays open."""
        step, at_s = IncidentStep.OPENED, time.time() + 60.0
        one = IncidentRecord(number=number, step=step, at_s=at_s, component=name, kind=kind, sentence="seen")
        self.file.append(one)

    async def pass_to(self, now: float) -> list[tuple[str, str, str]]:
        """Look with the registry's heartbeats, and the observer's; return the steps so far."""
        await self.look(
            now, *read_once(await self.registry.heartbeats(), Limits(None, 100.0)), beat("observer", WaitingFor.INPUT)
        )
        return [(row.worker, row.rung, row.outcome) for row in read_steps(self.run_dir)]


GUESTS = ("generator-hostb-x-0", "generator-hostb-x-1")


async def test_an_incident_that_a_joined_workers_restart_did_not_end_leads_to_its_eviction(tmp_path: Path) -> None:
    desk, name = JoinedDesk(tmp_path), GUESTS[0]
    await desk.registry.set_fleet(Fleet({Role.LEARNER: 1, Role.GENERATOR: 2}))
    for guest, host in ((name, "hostb"), (GUESTS[1], "hostb"), ("generator-hostc-x-0", "hostc")):
        await desk.start(guest, host)
    await desk.pass_to(0.0)
    desk.find(1, name)
    await desk.pass_to(1.0)
    assert (await desk.pass_to(11.0))[-1] == (name, "restart", "begun")
    assert await desk.registry.epoch(name) == 2, "fenced: its heartbeat is gone"
    for now in (12.0, 20.0):
        assert (await desk.pass_to(now))[-1] == (name, "restart", "begun"), "its supervisor starts it again"
    await desk.start(name, "hostb")
    assert (await desk.pass_to(21.0))[-1] == (name, "restart", "done")
    await desk.pass_to(52.0)
    assert (await desk.pass_to(180.0))[-1] == (name, "evict", "begun")
    fleet = await desk.registry.fleet()
    assert fleet is not None and [(one.worker, one.host) for one in fleet.evictions] == [(name, "")]


async def test_a_joined_worker_that_does_not_come_back_is_left_alone_and_not_evicted(tmp_path: Path) -> None:
    desk, name = JoinedDesk(tmp_path), GUESTS[0]
    await desk.registry.set_fleet(Fleet({Role.LEARNER: 1, Role.GENERATOR: 2}))
    await desk.start(name, "hostb")
    await desk.start("generator-hostc-x-0", "hostc")
    await desk.pass_to(0.0)
    desk.find(1, name)
    await desk.pass_to(1.0)
    await desk.pass_to(11.0)
    taken = await desk.pass_to(11.0 + desk.escalation._restart_timeout_s)
    assert taken[-1] == (name, "restart", "left") and desk.escalation.cases == ()
    assert (await desk.registry.fleet()) == Fleet({Role.LEARNER: 1, Role.GENERATOR: 2})
    await desk.start(name, "hostb")
    assert (await desk.pass_to(900.0))[-1] == (name, "tolerate", "begun"), "its incident is still open"


async def test_wrong_tokens_start_a_self_check_and_the_generator_that_it_proves_is_evicted(tmp_path: Path) -> None:
    desk = JoinedDesk(tmp_path)
    await desk.registry.set_fleet(Fleet({Role.LEARNER: 1, Role.GENERATOR: 2}))
    names = [f"generator-host{host}-x-0" for host in "bcd"]
    for name in names:
        await desk.start(name, name.split("-")[1])
    await desk.pass_to(0.0)
    desk.find(1, names[1], "mismatch")
    await desk.pass_to(1.0)
    assert (await desk.pass_to(11.0))[-1] == (names[1], "self_check", "begun")
    for name in names:
        await desk.answer(name, "other" if name == names[1] else "same")
    assert (await desk.pass_to(12.0))[-2:] == [(names[1], "self_check", "done"), (names[1], "evict", "begun")]
    fleet = await desk.registry.fleet()
    assert fleet is not None and [one.worker for one in fleet.evictions] == [names[1]]
    assert fleet.evictions[0].reason.endswith("its answer differs from that of 2 others")


async def test_workers_of_one_device_that_no_restart_mends_are_evicted_as_one_fault(tmp_path: Path) -> None:
    desk, names = JoinedDesk(tmp_path), [f"generator-hostb-x-{number}" for number in range(4)]
    await desk.registry.set_fleet(Fleet({Role.LEARNER: 1, Role.GENERATOR: 2}))
    for name, gpu in zip(names, ("GPU-1", "GPU-1", "GPU-2", "GPU-3"), strict=True):
        await desk.start(name, "hostb", gpu)
    await desk.pass_to(0.0)
    for number, name in enumerate(names[:2], 1):
        desk.find(number, name)
    await desk.pass_to(1.0)
    await desk.pass_to(11.0)
    for name in names[:2]:
        # a young process has not read its devices yet
        await desk.start(name, "hostb")
    for now in (12.0, 43.0, 170.0):
        taken = await desk.pass_to(now)
    assert taken[-2:] == [(names[0], "evict", "begun"), (names[1], "evict", "done")]
    fleet = await desk.registry.fleet()
    assert fleet is not None and [(one.worker, one.host) for one in fleet.evictions] == [
        (name, "") for name in names[:2]
    ]


async def test_a_joined_host_whose_workers_no_restart_mends_is_evicted_by_its_name(tmp_path: Path) -> None:
    desk = JoinedDesk(tmp_path)
    await desk.registry.set_fleet(Fleet({Role.LEARNER: 1, Role.GENERATOR: 2}))
    for guest in GUESTS:
        await desk.start(guest, "hostb")
    await desk.start("generator-hostc-x-0", "hostc")
    await desk.pass_to(0.0)
    for number, guest in enumerate(GUESTS, 1):
        desk.find(number, guest)
    await desk.pass_to(1.0)
    await desk.pass_to(11.0)
    for guest in GUESTS:
        await desk.start(guest, "hostb")
    for now in (12.0, 43.0, 170.0):
        taken = await desk.pass_to(now)
    assert taken[-2:] == [(GUESTS[0], "evict", "begun"), (GUESTS[1], "evict", "done")], "one eviction"
    fleet = await desk.registry.fleet()
    assert fleet is not None and fleet.counts[Role.GENERATOR] == 2
    assert [(one.worker, one.host) for one in fleet.evictions] == [("", "hostb")]
    assert [await desk.registry.epoch(guest) for guest in GUESTS] == [4, 4], "all are fenced"


@pytest.mark.parametrize("age_s", [60.0, 7200.0])
async def test_before_the_last_level_the_newest_change_of_the_settings_is_rolled_back(
    tmp_path: Path, age_s: float
) -> None:
    desk = Desk(tmp_path, "recovery.restart_timeout_s=10")
    key = "learner.learning_rate"
    change = after(None, {key: "0.5"}, {key: "1e-06"}, by="ann@a", at_s=time.time() - age_s)
    assert await desk.registry.add_settings_change(change)
    desk.escalation.lost(0.0, "learner", Role.LEARNER, "killed")
    for now in (1.0, 11.0, 21.0):
        taken = await desk.look(now)
    changes = await desk.registry.settings_changes()
    if age_s > 3600.0:
        assert taken[-1] == ("whole_run", "begun") and len(changes) == 1
        return
    assert ("rollback", "begun") in taken and desk.fleet.plan.failure is None
    assert (changes[-1].sets, changes[-1].undoes, changes[-1].by) == ({key: "1e-06"}, 1, "supervisor")
    assert changes[-1].reason.startswith("learner does not come back: no work within 10 s")
    taken = await desk.look(32.0)
    assert taken[-1] == ("whole_run", "begun")


@pytest.mark.parametrize("has_its_own", [True, False])
async def test_the_ladder_rolls_back_only_a_change_that_the_sick_worker_takes(
    tmp_path: Path, has_its_own: bool
) -> None:
    desk = Desk(tmp_path, "recovery.restart_timeout_s=10")
    own, of_others = "learner.learning_rate", "code.rewards"
    first = after(None, {own: "0.5"}, {own: "1e-06"}, by="ann@a", at_s=time.time()) if has_its_own else None
    code = {of_others: '"00ff00ff00ff00ff"'}
    other = after(first, code, {of_others: '""'}, by="ann@a", at_s=time.time())
    for change in (first, other):
        assert change is None or await desk.registry.add_settings_change(change)
    # it has proved good
    await desk.settings.settle(desk.registry, other.number)
    desk.escalation.lost(0.0, "learner", Role.LEARNER, "killed")
    for now in (1.0, 11.0, 21.0):
        taken = await desk.look(now)
    changes = await desk.registry.settings_changes()
    assert changes[-1].holds[of_others] == code[of_others]
    if has_its_own:
        assert ("rollback", "begun") in taken and (changes[-1].undone, changes[-1].holds[own]) == ((1,), "1e-06")
    else:
        assert ("rollback", "skipped") in taken and len(changes) == 1
