"""From a snapshot to an explanation: where the chains of waits begin, and which matters most."""

from __future__ import annotations

from dataclasses import replace

from pipeline.fleet.health import HealthKind
from pipeline.fleet.incidents.records import Incident
from pipeline.fleet.status import WorkerRow, pause_words
from pipeline.fleet.why.silence import no_ledger_chain
from pipeline.fleet.why.types import (
    Cause,
    Chain,
    Ended,
    Explanation,
    Outlook,
    Snapshot,
    count,
    seconds,
    worst,
)
from pipeline.fleet.why.workers import (
    absent_chain,
    admission_chain,
    evaluation_chain,
    how_far,
    role_absent_chain,
    unit_chain,
    unreachable_chain,
    unwell,
    worker_chain,
)
from pipeline.ledger.admin import Waits
from pipeline.ledger.types import LatePolicy, Totals, Unit
from pipeline.runtime.registry.contract import UNUSABLE_IN_A_ROW, RunState, WaitingFor
from pipeline.training.critic_gate import GATE_OPEN, describe_gate
from protocol.ids import Role
from protocol.printable import printable_line

_OVER = (RunState.FINISHED, RunState.FAILED, RunState.STOPPING)
_MAX_CHAINS = 4
_MAX_WORKERS = 8
_MAX_INCIDENTS = 5


def explain(s: Snapshot) -> Explanation:
    """Explain what the run waits for, most important chain first."""
    chains = _chains(s)
    if s.waits is not None and s.state not in _OVER:
        chains[:0] = [_no_room(name, ended) for name, ended in s.exits.items() if ended.is_without_room]
        chains[:0] = [_refused(row) for row in s.workers if row.refused and row.health is not HealthKind.SILENT]
    if _is_unsupervised(s):
        chains.insert(int(chains[0].outlook is Outlook.YOU), _unsupervised(s))
    return Explanation.of(chains[:_MAX_CHAINS], _also(s, chains[:_MAX_CHAINS]))


def _chains(s: Snapshot) -> list[Chain]:
    if s.waits is None or s.totals is None:
        return [no_ledger_chain(s)]
    if s.unwritten is not None and s.state not in _OVER:
        return [_full_disk(s, s.unwritten)]
    alive = [row for row in s.workers if row.health is not HealthKind.SILENT]
    if not s.has_supervisor and not alive:
        return [_no_process(s)]
    if s.state in _OVER:
        return [_ending(s)]
    learner = next(iter(s.rows(Role.LEARNER)), None)
    if learner is None:
        return [role_absent_chain(s, Role.LEARNER)]
    if learner.health is not HealthKind.LIVE or learner.waiting_for is not WaitingFor.INPUT:
        return [_learner_busy(s, s.waits, learner)]
    return _learner_waits(s, s.waits, s.totals)


# -- before and after the work ---------------------------------------------------------------------


def _no_room(name: str, ended: Ended) -> Chain:
    link = f"{name} ran out of disk space: {ended}"
    doing = "make room in that folder. Work since the worker's last checkpoint is repeated; nothing is lost"
    return Chain((link,), Cause.DISK, name, Outlook.YOU, doing)


def _refused(row: WorkerRow) -> Chain:
    doing = (
        "make room or grant rights there; updates go on, and the next checkpoint tries again. If the process dies "
        "first, work since its last checkpoint is repeated; nothing is lost"
    )
    return Chain((f"{row.worker} cannot write to its disk: {row.refused}",), Cause.DISK, row.worker, Outlook.YOU, doing)


def _full_disk(s: Snapshot, folder: str) -> Chain:
    link = f"everything waits for room on the ledger's disk: its server cannot write to {folder}, and takes no writes"
    doing = (
        f"make room there (`df {folder}`): the server tries again every second, and the run goes on by itself. Workers "
        "wait for ledger.disk_timeout_s"
    )
    return Chain((link,), Cause.DISK, "ledger", Outlook.YOU, doing)


def _no_process(s: Snapshot) -> Chain:
    how = f"{s.state}" + (f": {s.detail}" if s.detail else "")
    if s.state is RunState.FINISHED:
        doing = f"the report: `headrace run report {s.run}`"
        return Chain((f"nothing: the run is {how}",), Cause.NOBODY, "", Outlook.ENDED, doing)
    doing = f"`headrace up --resume {s.run}` continues it"
    if s.state is RunState.FAILED:
        doing = f"fix that first; then {doing}"
    return Chain((f"the run has no process; it is {how}",), Cause.NOBODY, "", Outlook.YOU, doing)


def _is_unsupervised(s: Snapshot) -> bool:
    is_alive = any(row.health is not HealthKind.SILENT for row in s.workers)
    return not s.has_supervisor and s.waits is not None and is_alive and s.state not in _OVER


def _unsupervised(s: Snapshot) -> Chain:
    link = "no supervisor runs: workers go on, but a dead one is not restarted"
    doing = f"`headrace up --resume {s.run}` goes on with them, `headrace down {s.run}` ends them"
    return Chain((link,), Cause.SUPERVISOR, "supervisor", Outlook.YOU, doing)


def _ending(s: Snapshot) -> Chain:
    link = f"the run is {s.state}" + (f", {s.detail}" if s.detail else "")
    if s.state is RunState.FAILED:
        doing = f"the run ends; fix that, then `headrace up --resume {s.run}`"
        return Chain((link,), Cause.FAILED, "supervisor", Outlook.YOU, doing)
    left = sorted(s.workers, key=lambda row: (row.health is HealthKind.LIVE, row.role is not Role.LEARNER))
    if not left:
        return Chain((link,), Cause.DRAINING, "supervisor", Outlook.ENDED, "the supervisor writes the report and ends")
    names = ", ".join(row.worker for row in left)
    end = worker_chain(s, left[0])
    now = f"`headrace down {s.run} --now` does not wait"
    doing = f"undrained workers are killed after supervisor.drain_timeout_s; {now}"
    return Chain((link, f"{names} still to end", *end.links), Cause.DRAINING, left[0].worker, Outlook.ENDED, doing)


# -- the learner -----------------------------------------------------------------------------------


def _learner_busy(s: Snapshot, waits: Waits, row: WorkerRow) -> Chain:
    """Explain a learner that computes, publishes, starts, or is frozen."""
    if row.health is HealthKind.LIVE and row.waiting_for is WaitingFor.WEIGHTS:
        link = f"learner waits for {row.detail}"
        if lag := s.awaited(row):
            return worst([worker_chain(s, other, seen=(row.worker,)) for other in lag]).after(link)
        doing = "a generator that takes no weights within weights.ack_timeout_s is fenced and replaced"
        return Chain((link,), Cause.WEIGHTS, "learner", Outlook.MOVES, doing)
    chain = worker_chain(s, row)
    if chain.cause is not Cause.WORKING:
        return chain
    if row.policy_version < 0:
        return replace(chain, links=(f"learner is getting ready, {how_far(row)}",))
    done, wanted = row.counters.get("updates", 0), row.counters.get("num_updates", 0)
    of = f"update {done + 1:.0f} of {wanted:.0f}" if wanted else "the first update"
    ready = f"{waits.num_ready} of {count(waits.num_needed, _noun(waits))} of the next update are ready"
    link = f"learner is at {of}, {how_far(row)}; {ready}"
    return replace(chain, links=(link,))


def _learner_waits(s: Snapshot, waits: Waits, totals: Totals) -> list[Chain]:
    gate = _gate_chain(s, waits, totals)
    if gate is not None:
        return [gate]
    if totals.is_closed:
        evaluation = evaluation_chain(s, waits)
        if evaluation is not None:
            return [evaluation.after("learner waits for the last evaluation")]
    return _unit_chains(s, waits, totals)


def _unit_chains(s: Snapshot, waits: Waits, totals: Totals) -> list[Chain]:
    missing = waits.num_needed - waits.num_ready
    noun = _noun(waits)
    if missing <= 0 and waits.late is LatePolicy.WAIT and waits.units:
        link = f"learner has {count(waits.num_needed, noun)} ready, but waits for work that would be too stale after it"
        # All units of the oldest version are awaited.
        oldest = min((u.oldest_version for u in waits.units if u.oldest_version is not None), default=None)
        late = [unit_chain(s, waits, unit) for unit in waits.units if unit.oldest_version == oldest]
        return [chain.after(link) for chain in _grouped(late, enough=False)]
    if missing <= 0:
        link = f"learner has {waits.num_ready} of {count(waits.num_needed, noun)} ready"
        return [Chain((link,), Cause.WORKING, "learner", Outlook.MOVES, "it claims them next")]
    link = f"learner waits for {missing} of {count(waits.num_needed, noun)}"
    chains = [unit_chain(s, waits, unit) for unit in waits.units]
    num_moving = sum(chain.outlook is Outlook.MOVES for chain in chains)
    # The units are a sample; assume that the others are like them.
    num_moving = num_moving * waits.num_running // max(1, len(chains))
    grouped = _grouped(chains, enough=num_moving >= missing)
    if waits.num_running < missing:
        lacking = admission_chain(s, totals)
        if chains:
            lacking = lacking.after(f"{count(missing - waits.num_running, noun)} are not yet admitted")
        grouped = sorted([*grouped, lacking], key=lambda chain: chain.outlook.gravity, reverse=True)
    if (useless := _without_signal(s, waits)) is not None:
        grouped = [useless, *(chain for chain in grouped if chain.outlook is not Outlook.MOVES)]
    return [chain.after(link) for chain in grouped]


def _without_signal(s: Snapshot, waits: Waits) -> Chain | None:
    """Explain a batch's worth of groups in a row with nothing to learn from; None if there were fewer."""
    row = s.rows(Role.LEARNER)[0]
    unusable = int(row.counters.get(UNUSABLE_IN_A_ROW, 0))
    groups = waits.num_needed if waits.unit is Unit.GROUP else waits.num_needed // waits.group_size
    if unusable < max(1, groups):
        return None
    link = f"the last {count(unusable, 'group')} were all right or all wrong, masked, or could not be scored: they were dropped"
    doing = (
        "the data is too easy or too hard for this policy, or its verifier is wrong: look at `headrace samples`, and change "
        "the data. The run ends after algorithm.max_generation_batches such batches, with 0 never"
    )
    return Chain((link,), Cause.NO_SIGNAL, "", Outlook.YOU, doing)


def _grouped(chains: list[Chain], *, enough: bool) -> list[Chain]:
    """Keep one chain for each root cause, gravest first, or last if ``enough`` units are on their way."""
    by_root: dict[tuple[Cause, str], Chain] = {}
    for chain in chains:
        root = (chain.cause, chain.who)
        first = by_root.get(root)
        by_root[root] = chain if first is None else replace(first, num_units=first.num_units + 1)
    return sorted(by_root.values(), key=lambda chain: chain.outlook.gravity, reverse=not enough)


def _gate_chain(s: Snapshot, waits: Waits, totals: Totals) -> Chain | None:
    """Explain a policy that waits for its critic; None if it does not."""
    needs = s.critic
    if needs is None:
        return None
    row = next(iter(s.rows(Role.VALUE)), None)
    learner = s.rows(Role.LEARNER)[0]
    if row is None:
        # Once started, the policy needs the value worker for chunks only.
        if learner.counters.get("updates", 0):
            return None
        names = s.absent(Role.VALUE)
        end = absent_chain(s, names[0]) if names else role_absent_chain(s, Role.VALUE)
        return end.after("learner waits for its critic")
    is_open = row.counters.get(GATE_OPEN, 0.0) >= 1.0
    if is_open or (GATE_OPEN not in row.counters and learner.counters.get("updates", 0)):
        return None
    words = describe_gate(row.counters, needs.min_explained_variance, needs.pretrain_steps)
    link, there, wanted = f"learner waits for its critic: {words}", s.depth("finished"), needs.batch_trajectories
    if row.health is not HealthKind.LIVE or row.waiting_for is not WaitingFor.INPUT or there >= wanted:
        return worker_chain(s, row).after(link)
    link_of = f"{row.worker} waits for {wanted - there} of {count(wanted, 'finished response')}"
    if not waits.units:
        return admission_chain(s, totals).after(link, link_of)
    chains = _grouped([unit_chain(s, waits, unit) for unit in waits.units], enough=True)
    return chains[0].after(link, link_of)


def _incident(s: Snapshot, incident: Incident) -> str:
    age = seconds(s.now_s - incident.since_s)
    words = f"incident {incident.number}, for {age}: {incident.component} is {incident.kinds[-1]}"
    cause = next(iter(incident.causes), None)
    because = f"; cause: {cause.component} is {cause.kind}" if cause and cause.component != incident.component else ""
    return printable_line(f"{words} ({incident.sentence}){because}; `headrace fleet incidents show {incident.number}`")


def _noun(waits: Waits) -> str:
    return {Unit.GROUP: "group", Unit.TRAJECTORY: "trajectory", Unit.CHUNK: "chunk"}[waits.unit]


# -- besides ---------------------------------------------------------------------------------------


def _also(s: Snapshot, chains: list[Chain]) -> list[str]:
    """Return other noteworthy facts, about workers that no chain names."""
    told = {chain.who for chain in chains}
    incidents = () if s.state in _OVER else s.incidents
    words = [_incident(s, incident) for incident in incidents[:_MAX_INCIDENTS]]
    if more := len(incidents[_MAX_INCIDENTS:]):
        words.append(f"{count(more, 'more open incident')}: `headrace fleet incidents list --open {s.run}`")
    words += () if s.state in _OVER else s.evicted
    words += [worker_chain(s, row).links[0] for row in unwell(s.workers) if row.worker not in told]
    if s.waits is not None and s.state not in _OVER and s.has_supervisor:
        words += [absent_chain(s, name).links[0] for name in s.absent() if name not in told]
    cut_off = {chain.who for chain in chains if chain.cause is Cause.UNREACHABLE}
    words += [unreachable_chain(row).links[0] for row in s.workers if row.unreached and row.worker not in cut_off]
    again = {row.worker for row in s.workers} - told
    worth = {name: ended for name, ended in s.exits.items() if name in again and ended.is_worth_a_word}
    words += [f"{name} is back: {ended}" for name, ended in worth.items()]
    if len(words) > _MAX_WORKERS:
        words[_MAX_WORKERS:] = [f"{len(words) - _MAX_WORKERS} more workers: `headrace status {s.run}`"]
    if (
        s.totals is not None
        and s.totals.paused is not None
        and all(chain.cause is not Cause.PAUSED for chain in chains)
    ):
        words.append(f"{pause_words(s.totals.paused)}: `headrace run resume {s.run}`")
    if dead := s.depth("dead"):
        words.append(f"{count(dead, 'dead letter')}: `headrace ledger dead-letters list`")
    return words
