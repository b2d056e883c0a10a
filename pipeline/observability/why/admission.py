"""The roots when too little is on the way: credit, memory, data, admission closed, or generators
that do not lease.

*Consumes* a snapshot. *Produces* the rest of a chain. *Waits for* nothing.
"""

from __future__ import annotations

from pipeline.ledger.contract import Totals
from pipeline.observability.status import WorkerRow
from pipeline.observability.why.types import Cause, Chain, Outlook, Snapshot, count, worst
from pipeline.observability.why.workers import generators_chain, role_absent_chain, worker_chain
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Role
from protocol.trajectory import Field

_MB = 2.0**20


def admission_chain(s: Snapshot, totals: Totals) -> Chain:
    """Return why no more work is on the way."""
    if totals.is_closed:
        link = "admission is closed: the run has all the updates that it wants"
        return Chain((link,), Cause.CLOSED, "", Outlook.ENDED, "the run ends when evaluation is done")
    if totals.is_exhausted and not s.depth("parked"):
        link = f"all prompts are admitted, {count(totals.num_groups_admitted, 'group')}: there is no more data"
        doing = "the run ends with what it has learned; set data.epochs higher or add prompts for another"
        return Chain((link,), Cause.EXHAUSTED, "", Outlook.ENDED, doing)
    memory = s.queues.get("bytes")
    if memory is not None and memory.limit is not None and memory.depth > memory.limit:
        link = f"the ledger holds {memory.depth / _MB:,.1f} of {memory.limit / _MB:,.1f} MB: nothing is admitted"
        return _memory_chain(s).after(link)
    if totals.credit_used >= totals.credit_limit:
        link = f"credit is used up, {totals.credit_used:,} of {totals.credit_limit:,}: as far ahead as staleness.eta allows"
        return _credit_chain(s).after(link)
    parked = s.depth("parked")
    link = (
        f"{count(parked, 'trajectory')} parked at a window"
        if parked
        else f"credit is free, {totals.credit_used:,} of {totals.credit_limit:,}"
    )
    return generators_chain(s).after(link)


def _memory_chain(s: Snapshot) -> Chain:
    """What holds the ledger's memory, and who lets go of it."""
    if claimed := s.depth("claimed"):
        link = f"{count(claimed, 'claimed unit')} are kept until the checkpoint that holds their effect"
        return _who_frees(s, Role.LEARNER, link, "an idle learner checkpoints after some seconds, which settles them")
    finished = s.depth("finished") + s.depth("finished_claimed")
    if finished:
        link = f"{count(finished, 'finished response')} are kept for the value worker"
        return _who_frees(s, Role.VALUE, link, "it trains on them and settles them with its next checkpoint")
    for field, role in ((Field.REWARD, Role.REWARD), (Field.REFERENCE, Role.REFERENCE), (Field.VALUE, Role.VALUE)):
        if waiting := s.depth(field.value):
            return _who_frees(
                s, role, f"{count(waiting, 'chunk')} wait for their {field}", "their units then become ready"
            )
    doing = "work that is there goes on and makes room; if this recurs, give the next run more ledger.max_memory_mb"
    return Chain(("what is being sampled fills it",), Cause.MEMORY, "bytes", Outlook.MENDS, doing)


def _who_frees(s: Snapshot, role: Role, link: str, doing: str) -> Chain:
    rows = s.healthy(role) or s.rows(role)
    end = worst([worker_chain(s, row) for row in rows]) if rows else role_absent_chain(s, role)
    if end.outlook is not Outlook.MOVES:
        return end.after(link)
    return Chain((link, *end.links), Cause.MEMORY, "bytes", Outlook.MENDS, doing)


def _credit_chain(s: Snapshot) -> Chain:
    learner = next(iter(s.rows(Role.LEARNER)), None)
    if learner is None:
        return role_absent_chain(s, Role.LEARNER)
    if _waits_for_input(learner):
        link = "and the learner has nothing to claim that would return any"
        doing = "should this last, it is a bug: `headrace audit`, keep the folder and report it"
        return Chain((link,), Cause.CREDIT, "credit", Outlook.MOVES, doing)
    return worker_chain(s, learner)


def _waits_for_input(row: WorkerRow) -> bool:
    return row.waiting_for is WaitingFor.INPUT
