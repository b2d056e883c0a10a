"""Root causes: from work that is not ready (units, trajectories, evaluations) to the worker that holds it, from
a worker that is absent, frozen, stuck, starting or waiting to the one that it waits for, and why too little is in
flight: credit, memory, data, paused or closed admission."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.fleet.health import HealthKind
from pipeline.fleet.status import WorkerRow, pause_words
from pipeline.fleet.why.types import Cause, Chain, Outlook, Snapshot, count, seconds, worst
from pipeline.ledger.admin import Holder, Lack, Place, WaitedTrajectory, WaitedUnit, Waits
from pipeline.ledger.types import Totals, Unit
from pipeline.runtime.registry.contract import WaitingFor, unreached_workers
from protocol.ids import ELASTIC_ROLES, Role
from protocol.trajectory import Field

SCORER = {
    Field.REWARD: Role.REWARD,
    Field.REFERENCE: Role.REFERENCE,
    Field.VALUE: Role.VALUE,
    Field.GUIDANCE: Role.REFERENCE,
    Field.TURN: Role.ENVIRONMENT,
}
_AT_WORK = {
    Role.GENERATOR: "is sampling",
    Role.REWARD: "is scoring",
    Role.REFERENCE: "is scoring",
    Role.VALUE: "is scoring or learning",
    Role.ENVIRONMENT: "is answering",
    Role.LEARNER: "is learning",
}


def absent_chain(s: Snapshot, name: str) -> Chain:
    """Explain a wanted worker without a heartbeat."""
    ended = s.exits.get(name)
    link = f"{name} is missing" + (f": {ended}" if ended else "")
    if not s.has_supervisor:
        return Chain((link,), Cause.ABSENT, name, Outlook.YOU, _no_supervisor(s))
    doing = f"the supervisor starts it; if it does not come up, read logs/{name}.jsonl and logs/{name}.out"
    if ended and ended.error:
        again = "the supervisor starts it again. The same error before any finished work ends the run"
        doing = f"{again}: logs/{name}.jsonl"
    return Chain((link,), Cause.ABSENT, name, Outlook.MENDS, doing)


def role_absent_chain(s: Snapshot, role: Role) -> Chain:
    """Explain a role without a heartbeat."""
    names = s.absent(role)
    if names:
        return absent_chain(s, names[0])
    doing = f"start one: `headrace up --resume {s.run}`"
    if role in ELASTIC_ROLES:
        doing = f"start one: `headrace scale {role}=1 {s.run}` here, or `headrace fleet join` on another host"
    return Chain((f"there is no {role} worker",), Cause.ABSENT, str(role), Outlook.YOU, doing)


def role_chain(s: Snapshot, role: Role) -> Chain:
    """Explain the gravest wait of a role's live workers, else of all its workers, else its absence."""
    rows = s.healthy(role) or s.rows(role)
    return worst([worker_chain(s, row) for row in rows]) if rows else role_absent_chain(s, role)


def worker_chain(s: Snapshot, row: WorkerRow, *, seen: tuple[str, ...] = ()) -> Chain:
    """Explain a worker with a heartbeat. ``seen``: workers earlier in the chain."""
    name, at = row.worker, row.waiting_for
    if row.health is not HealthKind.LIVE:
        return _unwell(s, row)
    detail = f": {row.detail}" if row.detail else ""
    if at is WaitingFor.STARTING:
        ended = s.exits.get(name)
        again = f"; the one before: {ended}" if ended and ended.is_worth_a_word else ""
        link = f"{name} is starting, for {seconds(row.uptime_s)}{detail}{again}"
        doing = "it loads its model and data; its log has the progress"
        return Chain((link,), Cause.STARTING, name, Outlook.MOVES, doing)
    if at in (WaitingFor.DRAINING, WaitingFor.STOPPED):
        doing = "it returns what it holds, so that others can continue it, and ends"
        return Chain((f"{name} is {at}{detail}",), Cause.DRAINING, name, Outlook.MOVES, doing)
    if at is WaitingFor.QUARANTINE:
        doing = (
            "the learner checks its copy, and publishes it again if that is damaged. Other generators go on with the "
            "work. If it happens again, distrust the memory of its host"
        )
        return Chain((f"{name} is in quarantine{detail}",), Cause.QUARANTINE, name, Outlook.MENDS, doing)
    if at is WaitingFor.LEDGER:
        return ledger_chain(f"{name} waits for the ledger{detail}")
    if at is WaitingFor.ENDPOINT:
        doing = (
            "check that it is running, and its rate limits: requests are retried until it answers. Meanwhile no response "
            "counts as wrong or failed"
        )
        return Chain((f"{name} waits for {row.detail}",), Cause.ENDPOINT, name, Outlook.YOU, doing)
    unreached = unreached_workers(row.unreached)
    is_cut_off = unreached - {Role.LEARNER} if at is WaitingFor.ROOM else Role.LEARNER in unreached
    if at in (WaitingFor.ROOM, WaitingFor.WEIGHTS) and is_cut_off:
        return unreachable_chain(row)
    if at is WaitingFor.ROOM:
        return _room(s, row, seen)
    if at in (WaitingFor.WEIGHTS, WaitingFor.CREDIT):
        link = f"{name} waits for {at}{detail}"
        if not s.rows(Role.LEARNER):
            return role_absent_chain(s, Role.LEARNER).after(link)
        ends = [
            worker_chain(s, other, seen=(*seen, name)) for other in unwell(s.awaited(row)) if other.worker not in seen
        ]
        if ends:
            return worst(ends).after(link)
        cause = Cause.WEIGHTS if at is WaitingFor.WEIGHTS else Cause.CREDIT
        doing = "the learner publishes, and generators take it within moments"
        return Chain((link,), cause, name, Outlook.MOVES, doing)
    if at is WaitingFor.DISK:
        doing = (
            "it goes on once the files are written; a learner whose checkpoint gains no file for "
            "supervisor.checkpoint_timeout_s is replaced. If this keeps happening, the disk is slow: raise "
            "checkpoint.every_updates"
        )
        return Chain((f"{name} waits for its disk{detail}",), Cause.CHECKPOINT, name, Outlook.MOVES, doing)
    if at is WaitingFor.COMPUTE:
        link = f"{name} {_AT_WORK.get(row.role, 'is computing')}, {how_far(row)}"
        return Chain((link,), Cause.WORKING, name, Outlook.MOVES, "nothing is wrong: this takes its time")
    link = f"{name} waits for {at}{detail}"
    doing = "nothing is wrong: it takes the next piece of work as it comes"
    return Chain((link,), Cause.WORKING, name, Outlook.MOVES, doing)


def how_far(row: WorkerRow) -> str:
    """Return a worker's progress on long work, or else the time since its last progress."""
    return row.work.in_words() if row.work is not None else f"last progress {seconds(row.since_progress_s)} ago"


def scorer_chain(s: Snapshot, lack: Lack) -> Chain:
    """Explain a missing score by the worker that should write it."""
    role = SCORER[lack.field]
    failures = f", a scorer failed on it {count(lack.num_failures, 'time')}" if lack.num_failures else ""
    late = f"{seconds(lack.overdue_s)} overdue" if lack.overdue_s > 0.0 else f"due again in {seconds(-lack.overdue_s)}"
    waiting = s.depth(lack.field.value)
    since = "rewarded" if lack.field is Field.GUIDANCE else "written"
    link = (
        f"{lack.chunk} lacks its {lack.field}, {since} {seconds(lack.age_s)} ago, {late}{failures} "
        f"({count(waiting, 'chunk')} wait for {role})"
    )
    healthy = s.healthy(role)
    if not healthy:
        end, kept = role_chain(s, role), "; until then chunks wait in the ledger, and nothing is lost"
        return Chain(end.links, end.cause, end.who, end.outlook, end.next + kept).after(link)
    busy = [row for row in healthy if row.waiting_for is not WaitingFor.INPUT]
    if busy:
        return worker_chain(s, busy[0]).after(link)
    cut_off = [row for row in s.workers if unreached_workers(row.unreached) & {one.worker for one in healthy}]
    if cut_off:
        return unreachable_chain(cut_off[0]).after(link)
    names = " and ".join(row.worker for row in healthy)
    idle = f"{names} {'is' if len(healthy) == 1 else 'are'} idle: the message is on its way, or was lost with a dead process"
    doing = f"it is handed out again at its deadline; `headrace ledger requeue --field {lack.field}` does so now"
    outlook = Outlook.MOVES if lack.age_s < s.replaced_after_s else Outlook.MENDS
    return Chain((idle,), Cause.REDELIVERY, str(role), outlook, doing).after(link)


def unreachable_chain(row: WorkerRow) -> Chain:
    """Explain a worker that cannot reach a mailbox."""
    doing = (
        f"let {row.host} connect there: check firewalls (wire.ports), and an address that means another host there "
        "(wire.host, wire.advertise_host). Until then "
    )
    if unreached_workers(row.unreached) == {Role.LEARNER}:
        doing += "it gets no new version, and samples under the one that it has, as long as staleness allows"
    else:
        doing += "its chunks are scored at their deadlines, and others get its work"
    return Chain((f"{row.worker} does not reach {row.unreached}",), Cause.UNREACHABLE, row.worker, Outlook.YOU, doing)


def generators_chain(s: Snapshot) -> Chain:
    """Explain work that any generator can take."""
    healthy = s.healthy(Role.GENERATOR)
    if not healthy:
        return role_chain(s, Role.GENERATOR)
    order = (WaitingFor.LEDGER, WaitingFor.ROOM, WaitingFor.WEIGHTS, WaitingFor.STARTING, WaitingFor.COMPUTE)
    first = min(healthy, key=lambda row: order.index(row.waiting_for) if row.waiting_for in order else len(order))
    at_work = [row for row in healthy if row.waiting_for is WaitingFor.COMPUTE]
    return worker_chain(s, at_work[0] if at_work else first)


def ledger_chain(link: str) -> Chain:
    """Explain a ledger that does not answer a worker, or is full."""
    doing = (
        "workers keep their work and retry. The supervisor restarts an embedded server; you restart your own. "
        "Scorers and learner make room in a full one"
    )
    return Chain((link,), Cause.LEDGER, "ledger", Outlook.MENDS, doing)


def _unwell(s: Snapshot, row: WorkerRow) -> Chain:
    is_silent = row.health is HealthKind.SILENT
    link = f"{row.worker} is {row.health} for {seconds(row.unwell_s)}"
    cause = Cause.SILENT if is_silent else Cause.STUCK
    if not s.has_supervisor:
        return Chain((link,), cause, row.worker, Outlook.YOU, _no_supervisor(s))
    if row.worker not in s.wanted:
        end = f"end process {row.pid} on {row.host}, and start it again if you want it"
        doing = f"it is not one of the supervisor's workers: {end}"
        return Chain((link,), cause, row.worker, Outlook.MENDS, doing)
    after = f"after {seconds(s.replaced_after_s)} of silence" if is_silent else "(supervisor.stuck_after_s)"
    doing = f"the supervisor replaces it {after}; its work goes to others"
    return Chain((link,), cause, row.worker, Outlook.MENDS, doing)


def _room(s: Snapshot, row: WorkerRow, seen: tuple[str, ...]) -> Chain:
    """Explain a full mailbox by the worker that reads it."""
    link = f"{row.worker} waits for room: {row.detail}"
    passed = (*seen, row.worker)
    ends = [worker_chain(s, other, seen=passed) for other in s.awaited(row) if other.worker not in passed]
    if ends:
        return worst(ends).after(link)
    wanted = [role for role in SCORER.values() if s.absent(role) or role in row.detail.split()]
    missing = next((role for role in wanted if not s.rows(role)), None)
    if missing is not None:
        return role_absent_chain(s, missing).after(link)
    return Chain((link,), Cause.WORKING, row.worker, Outlook.MOVES, "its chunks are being written and sent")


def _no_supervisor(s: Snapshot) -> str:
    return f"no supervisor runs to start it again: `headrace up --resume {s.run}`"


def unwell(workers: Sequence[WorkerRow]) -> list[WorkerRow]:
    return [row for row in workers if row.health is not HealthKind.LIVE]


def unit_chain(s: Snapshot, waits: Waits, unit: WaitedUnit) -> Chain:
    """Explain why a unit is not ready, by its trajectory with the gravest outlook."""
    if waits.unit is not Unit.GROUP:
        # A unit without trajectories has become complete in the meantime.
        if not unit.trajectories:
            return _complete(unit.name)
        return _trajectory_chain(s, waits, unit.trajectories[0], unit.trajectories[0].name)
    link = f"group {unit.name} has {unit.num_complete} of {waits.group_size}"
    chains = [_trajectory_chain(s, waits, one, f"member {one.name.rpartition('.')[2]}") for one in unit.trajectories]
    return worst(chains).after(link) if chains else _complete(f"group {unit.name}")


def _complete(name: str) -> Chain:
    return Chain((f"{name} is complete",), Cause.WORKING, "learner", Outlook.MOVES, "the learner claims it next")


def _trajectory_chain(s: Snapshot, waits: Waits, one: WaitedTrajectory, called: str) -> Chain:
    missing = [scorer_chain(s, lack) for lack in one.lacks]
    if one.place is Place.FINISHED:
        return worst(missing).after(f"{called} is sampled ({_size(one)})")
    if one.place is Place.WAITING:
        return worst(missing).after(f"{called} waits for its environment ({_size(one)})")
    # Missing scores of earlier chunks delay nothing yet, unless their scorer is in trouble.
    grave = [chain for chain in missing if chain.outlook is not Outlook.MOVES and chain.cause is not Cause.REDELIVERY]
    if one.place is Place.LEASED:
        sampling = _leased(s, waits, one, called)
    else:
        since = f"{called} is open: without a holder for {seconds(one.since_s)} ({_size(one)})"
        sampling = generators_chain(s).after(since)
    return worst([sampling, *(chain.after(f"{called} ({_size(one)})") for chain in grave)])


def _leased(s: Snapshot, waits: Waits, one: WaitedTrajectory, called: str) -> Chain:
    worker, _, epoch = one.holder.rpartition("#")
    link = f"{called} is on {worker} ({_size(one)}, last written or leased {seconds(one.since_s)} ago)"
    holder = next((holder for holder in waits.holders if holder.who == one.holder), None)
    return _holder_chain(s, worker, int(epoch), holder).after(link)


def _holder_chain(s: Snapshot, worker: str, epoch: int, holder: Holder | None) -> Chain:
    """Explain the work held by an incarnation of a generator."""
    row = s.row(worker)
    left_s = holder.lease_left_s if holder else 0.0
    when = f"when its lease ends in {seconds(left_s)}" if left_s > 0.0 else "at the next lease call of any generator"
    if row is not None and row.epoch <= epoch:
        end = worker_chain(s, row)
        if row.health is HealthKind.LIVE:
            return end
        doing = (
            f"{end.next}; others take what it holds {when}, `headrace ledger requeue --worker {worker}` opens it now"
        )
        return Chain(end.links, end.cause, end.who, end.outlook, doing)
    gone = f"{worker}#{epoch} is gone" + (f": {s.exits[worker]}" if row is None and worker in s.exits else "")
    if not s.healthy(Role.GENERATOR):
        end = absent_chain(s, worker) if worker in s.absent() else role_absent_chain(s, Role.GENERATOR)
        return end if end.who == worker else end.after(gone)
    if row is not None:
        when = "at the next lease call of any generator"
    doing = f"others go on from the last chunk {when}; `headrace ledger requeue --worker {worker}` opens it now"
    return Chain((gone,), Cause.LEASE, worker, Outlook.MENDS, doing)


def evaluation_chain(s: Snapshot, waits: Waits) -> Chain | None:
    """Explain an evaluation's missing responses; None if none are missing."""
    chains: list[Chain] = []
    if waits.num_evaluation_open:
        chains.append(generators_chain(s).after(f"{count(waits.num_evaluation_open, 'evaluation response')} are open"))
    for holder in waits.holders:
        if holder.num_evaluation:
            worker, _, epoch = holder.who.rpartition("#")
            link = f"{count(holder.num_evaluation, 'evaluation response')} on {worker}"
            chains.append(_holder_chain(s, worker, int(epoch), holder).after(link))
    lacking = {Role.REWARD: waits.num_evaluation_unscored, Role.ENVIRONMENT: waits.num_evaluation_waiting}
    for role, number in lacking.items():
        if number:
            link = f"{count(number, 'evaluation response')} {'lack a' if role is Role.REWARD else 'wait for an'} {role}"
            chains.append(role_chain(s, role).after(link))
    return worst(chains) if chains else None


def _size(one: WaitedTrajectory) -> str:
    return f"{count(one.num_chunks, 'chunk')}, {count(one.num_tokens, 'token')}"


_MB = 2.0**20


def admission_chain(s: Snapshot, totals: Totals) -> Chain:
    """Explain why no more work is on the way."""
    if totals.is_closed:
        link = "admission is closed: the run has all its updates"
        return Chain((link,), Cause.CLOSED, "", Outlook.ENDED, "the run ends when evaluation is done")
    if totals.is_exhausted and not s.depth("parked"):
        link = f"all prompts are admitted, {count(totals.num_groups_admitted, 'group')}: there is no more data"
        doing = "the run ends with what it has learned; for more, add prompts or set data.epochs higher"
        return Chain((link,), Cause.EXHAUSTED, "", Outlook.ENDED, doing)
    if totals.paused is not None:
        doing = f"`headrace run resume {s.run}` admits groups again; work in flight is finished meanwhile"
        return Chain((pause_words(totals.paused),), Cause.PAUSED, "", Outlook.YOU, doing)
    memory = s.queues.get("bytes")
    if memory is not None and memory.limit is not None and memory.depth > memory.limit:
        link = f"the ledger holds {memory.depth / _MB:,.1f} of {memory.limit / _MB:,.1f} MB: nothing is admitted"
        return _memory_chain(s).after(link)
    if totals.credit_used >= totals.credit_limit:
        link = f"credit is used up, {totals.credit_used:,} of {totals.credit_limit:,}: staleness.eta allows no more"
        return _credit_chain(s).after(link)
    parked = s.depth("parked")
    link = f"credit is free, {totals.credit_used:,} of {totals.credit_limit:,}"
    return generators_chain(s).after(f"{count(parked, 'trajectory')} parked at a window" if parked else link)


def _memory_chain(s: Snapshot) -> Chain:
    """Explain what holds the ledger's memory, and which worker frees it."""
    if claimed := s.depth("claimed"):
        link = f"{count(claimed, 'claimed unit')} are kept until the checkpoint that holds their effect"
        return _freed_by(s, Role.LEARNER, link, "an idle learner checkpoints after some seconds, which settles them")
    if finished := s.depth("finished") + s.depth("finished_claimed"):
        link = f"{count(finished, 'finished response')} are kept for the value worker"
        return _freed_by(s, Role.VALUE, link, "it trains on them and settles them with its next checkpoint")
    for field, role in SCORER.items():
        if waiting := s.depth(field.value):
            link = f"{count(waiting, 'chunk')} wait for their {field}"
            return _freed_by(s, role, link, "their units then become ready")
    doing = "finished work makes room; if this recurs, give the next run more ledger.max_memory_mb"
    return Chain(("unfinished samples fill it",), Cause.MEMORY, "bytes", Outlook.MENDS, doing)


def _freed_by(s: Snapshot, role: Role, link: str, doing: str) -> Chain:
    end = role_chain(s, role)
    if end.outlook is not Outlook.MOVES:
        return end.after(link)
    return Chain((link, *end.links), Cause.MEMORY, "bytes", Outlook.MENDS, doing)


def _credit_chain(s: Snapshot) -> Chain:
    learner = next(iter(s.rows(Role.LEARNER)), None)
    if learner is None:
        return role_absent_chain(s, Role.LEARNER)
    if learner.waiting_for is WaitingFor.INPUT:
        link = "and the learner has no unit to claim that would return credit"
        doing = "if this lasts, it is a bug: keep the folder and report it with `headrace ledger audit`"
        return Chain((link,), Cause.CREDIT, "credit", Outlook.MOVES, doing)
    return worker_chain(s, learner)
