"""The roots among workers: one that is not there, frozen, stuck, starting, waiting for something
else, or simply at work.

*Consumes* a snapshot and a worker, or a role. *Produces* the rest of a chain. *Waits for* nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.ledger.admin import Lack
from pipeline.observability.status import Health, WorkerRow
from pipeline.observability.why.types import Cause, Chain, Outlook, Snapshot, count, seconds, worst
from pipeline.runtime.registry.contract import WaitingFor, unreached_workers
from protocol.ids import Role
from protocol.trajectory import Field

_SCORER = {Field.REWARD: Role.REWARD, Field.REFERENCE: Role.REFERENCE, Field.VALUE: Role.VALUE}
_AT_WORK = {
    Role.GENERATOR: "is sampling",
    Role.REWARD: "is scoring",
    Role.REFERENCE: "is scoring",
    Role.VALUE: "is scoring or learning",
    Role.LEARNER: "is learning",
}


def absent_chain(s: Snapshot, name: str) -> Chain:
    """Return the chain of a worker that is wanted and has no heartbeat."""
    ended = s.exits.get(name)
    link = f"{name} is not there" + (f": {ended}" if ended else "")
    if not s.has_supervisor:
        return Chain((link,), Cause.ABSENT, name, Outlook.YOU, _no_supervisor(s))
    doing = f"the supervisor starts it; if it does not come, read logs/{name}.jsonl and logs/{name}.out"
    if ended and ended.error:
        doing = f"the supervisor starts it again; the same error, before it finished any work, ends the run: logs/{name}.jsonl"
    return Chain((link,), Cause.ABSENT, name, Outlook.MENDS, doing)


def role_absent_chain(s: Snapshot, role: Role) -> Chain:
    """Return the chain of a role none of whose workers has a heartbeat."""
    names = s.absent(role)
    if names:
        return absent_chain(s, names[0])
    doing = f"start one: `python -P -m workers {role} --run-dir {s.run} --name my-{role}-0`, or `headrace up --resume {s.run}`"
    return Chain((f"there is no {role} worker",), Cause.ABSENT, str(role), Outlook.YOU, doing)


def worker_chain(s: Snapshot, row: WorkerRow, *, seen: tuple[str, ...] = ()) -> Chain:
    """Return the chain of a worker that has a heartbeat. ``seen``: workers that this chain has
    passed already.
    """
    name, at = row.worker, row.waiting_for
    if row.health is not Health.LIVE:
        return _unwell(s, row)
    detail = f": {row.detail}" if row.detail else ""
    if at is WaitingFor.STARTING:
        ended = s.exits.get(name)
        again = f"; the one before: {ended}" if ended and ended.is_worth_a_word else ""
        link = f"{name} is starting, for {seconds(row.uptime_s)}{detail}{again}"
        return Chain(
            (link,), Cause.STARTING, name, Outlook.MOVES, "it loads its model and data; its log tells how far it is"
        )
    if at in (WaitingFor.DRAINING, WaitingFor.STOPPED):
        link = f"{name} is {at}{detail}"
        return Chain(
            (link,),
            Cause.DRAINING,
            name,
            Outlook.MOVES,
            "it puts down what it holds, for others to go on with, and ends",
        )
    if at is WaitingFor.QUARANTINE:
        doing = (
            "the learner looks at its copy, and publishes it again if that is damaged; what the generator held goes on "
            "elsewhere. If it comes again, distrust the memory of its host"
        )
        return Chain((f"{name} is in quarantine{detail}",), Cause.QUARANTINE, name, Outlook.MENDS, doing)
    if at is WaitingFor.LEDGER:
        return ledger_chain(f"{name} waits for the ledger{detail}")
    unreached = unreached_workers(row.unreached)
    if (at is WaitingFor.ROOM and unreached - {Role.LEARNER}) or (
        at is WaitingFor.WEIGHTS and Role.LEARNER in unreached
    ):
        return unreachable_chain(row)
    if at is WaitingFor.ROOM:
        return _room(s, row, seen)
    if at in (WaitingFor.WEIGHTS, WaitingFor.CREDIT):
        link = f"{name} waits for {at}{detail}"
        learner = next(iter(s.rows(Role.LEARNER)), None)
        if learner is None:
            return role_absent_chain(s, Role.LEARNER).after(link)
        if learner.worker in seen or learner.health is Health.LIVE:
            cause = Cause.WEIGHTS if at is WaitingFor.WEIGHTS else Cause.CREDIT
            doing = "the learner publishes, and generators take it within moments"
            return Chain((link,), cause, name, Outlook.MOVES, doing)
        return worker_chain(s, learner, seen=(*seen, name)).after(link)
    if at is WaitingFor.COMPUTE:
        link = f"{name} {_AT_WORK.get(row.role, 'is computing')}, {how_far(row)}"
        return Chain((link,), Cause.WORKING, name, Outlook.MOVES, "nothing is wrong: this takes its time")
    link = f"{name} waits for {at}{detail}"
    return Chain(
        (link,), Cause.WORKING, name, Outlook.MOVES, "nothing is wrong: it takes the next piece of work as it comes"
    )


def how_far(row: WorkerRow) -> str:
    """Return how far a worker is with what takes long, else when it last got on."""
    return row.work.in_words() if row.work is not None else f"last progress {seconds(row.since_progress_s)} ago"


def scorer_chain(s: Snapshot, lack: Lack) -> Chain:
    """Return the chain of a field that is missing: whose mailbox, who is to write it."""
    role = _SCORER[lack.field]
    failures = f", a scorer failed on it {count(lack.num_failures, 'time')}" if lack.num_failures else ""
    late = f"{seconds(lack.overdue_s)} overdue" if lack.overdue_s > 0.0 else f"due again in {seconds(-lack.overdue_s)}"
    waiting = s.depth(lack.field.value)
    link = (
        f"{lack.chunk} lacks its {lack.field}, written {seconds(lack.age_s)} ago, {late}{failures} "
        f"({count(waiting, 'chunk')} wait for {role})"
    )
    healthy = s.healthy(role)
    if not healthy:
        rows = s.rows(role)
        end = worst([worker_chain(s, row) for row in rows]) if rows else role_absent_chain(s, role)
        kept = "; until then chunks wait in the ledger, and nothing is lost"
        return Chain((*end.links,), end.cause, end.who, end.outlook, end.next + kept).after(link)
    busy = [row for row in healthy if row.waiting_for is not WaitingFor.INPUT]
    if busy:
        return worker_chain(s, busy[0]).after(link)
    cut_off = [row for row in s.workers if unreached_workers(row.unreached) & {one.worker for one in healthy}]
    if cut_off:
        return unreachable_chain(cut_off[0]).after(link)
    names = " and ".join(row.worker for row in healthy)
    idle = f"{names} {'is' if len(healthy) == 1 else 'are'} idle: the message is on its way, or was lost with a dead process"
    doing = f"it is handed out again at its deadline; `headrace requeue --field {lack.field}` does so now"
    outlook = Outlook.MOVES if lack.age_s < s.replaced_after_s else Outlook.MENDS
    return Chain((idle,), Cause.REDELIVERY, str(role), outlook, doing).after(link)


def unreachable_chain(row: WorkerRow) -> Chain:
    """Return the chain of a worker whose messages do not come to where they should."""
    doing = (
        f"let {row.host} connect there: a firewall (wire.ports), an address that means another host there (wire.host, "
        "wire.advertise_host). Until then "
    )
    if unreached_workers(row.unreached) == {Role.LEARNER}:
        doing += "no new version comes to it: it samples under the one that it has, if any, as long as staleness allows"
    else:
        doing += "its chunks are scored at their deadlines, and others get its work"
    return Chain((f"{row.worker} does not reach {row.unreached}",), Cause.UNREACHABLE, row.worker, Outlook.YOU, doing)


def generators_chain(s: Snapshot) -> Chain:
    """Return the chain of work that any generator may take."""
    healthy = s.healthy(Role.GENERATOR)
    if not healthy:
        rows = s.rows(Role.GENERATOR)
        return worst([worker_chain(s, row) for row in rows]) if rows else role_absent_chain(s, Role.GENERATOR)
    order = (WaitingFor.LEDGER, WaitingFor.ROOM, WaitingFor.WEIGHTS, WaitingFor.STARTING, WaitingFor.COMPUTE)
    first = min(healthy, key=lambda row: order.index(row.waiting_for) if row.waiting_for in order else len(order))
    at_work = [row for row in healthy if row.waiting_for is WaitingFor.COMPUTE]
    return worker_chain(s, at_work[0] if at_work else first)


def ledger_chain(link: str) -> Chain:
    """Return the chain of a ledger that does not answer a worker, or has no room."""
    doing = (
        "workers hold what they have and try again: a server that died is started again (your own by you); one that is full "
        "gets room from what scorers and learner finish"
    )
    return Chain((link,), Cause.LEDGER, "ledger", Outlook.MENDS, doing)


def _unwell(s: Snapshot, row: WorkerRow) -> Chain:
    is_silent = row.health is Health.SILENT
    age_s = row.since_heartbeat_s if is_silent else row.since_progress_s
    link = f"{row.worker} is {row.health} for {seconds(age_s)}"
    cause = Cause.SILENT if is_silent else Cause.STUCK
    if not s.has_supervisor:
        return Chain((link,), cause, row.worker, Outlook.YOU, _no_supervisor(s))
    if row.worker not in s.wanted:
        doing = (
            f"it is none of the supervisor's: end process {row.pid} on {row.host} and start it again, if you want it"
        )
        return Chain((link,), cause, row.worker, Outlook.MENDS, doing)
    after = f"after {seconds(s.replaced_after_s)} of silence" if is_silent else "(supervisor.stuck_after_s)"
    return Chain(
        (link,), cause, row.worker, Outlook.MENDS, f"the supervisor replaces it {after}; its work goes to others"
    )


def _room(s: Snapshot, row: WorkerRow, seen: tuple[str, ...]) -> Chain:
    """A full mailbox: on to whoever is to read it."""
    link = f"{row.worker} waits for room: {row.detail}"
    named = [
        other for other in s.workers if other.worker in row.detail.split() and other.worker not in (*seen, row.worker)
    ]
    if named:
        return worst([worker_chain(s, other, seen=(*seen, row.worker)) for other in named]).after(link)
    wanted = [
        role for role in (Role.REWARD, Role.REFERENCE, Role.VALUE) if s.absent(role) or role in row.detail.split()
    ]
    missing = next((role for role in wanted if not s.rows(role)), None)
    if missing is not None:
        return role_absent_chain(s, missing).after(link)
    return Chain((link,), Cause.WORKING, row.worker, Outlook.MOVES, "its chunks are being written and sent")


def _no_supervisor(s: Snapshot) -> str:
    return f"no supervisor runs, so nobody starts it again: `headrace up --resume {s.run}`"


def unwell(workers: Sequence[WorkerRow]) -> list[WorkerRow]:
    """Return the workers that are silent or stuck."""
    return [row for row in workers if row.health is not Health.LIVE]
