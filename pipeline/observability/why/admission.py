"""The roots when too little is on the way: credit, memory, data, paused or closed admission."""

from __future__ import annotations

from pipeline.ledger.types import Totals
from pipeline.observability.status import pause_words
from pipeline.observability.why.types import Cause, Chain, Outlook, Snapshot, count
from pipeline.observability.why.workers import SCORER, generators_chain, role_absent_chain, role_chain, worker_chain
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Role

_MB = 2.0**20


def admission_chain(s: Snapshot, totals: Totals) -> Chain:
    """Return why no more work is on the way."""
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
    """Return what holds the ledger's memory, and the worker that frees it."""
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
