"""From work that is not ready to the worker that holds it (units, trajectories, evaluations), and why too
little is in flight: credit, memory, data, paused or closed admission."""

from __future__ import annotations

from pipeline.fleet.health import HealthKind
from pipeline.fleet.status import pause_words
from pipeline.fleet.why.types import Cause, Chain, Outlook, Snapshot, count, seconds, worst
from pipeline.fleet.why.workers import (
    SCORER,
    absent_chain,
    generators_chain,
    role_absent_chain,
    role_chain,
    scorer_chain,
    worker_chain,
)
from pipeline.ledger.admin import Holder, Place, WaitedTrajectory, WaitedUnit, Waits
from pipeline.ledger.types import Totals, Unit
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Role


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
    if waits.num_evaluation_unscored:
        link = f"{count(waits.num_evaluation_unscored, 'evaluation response')} lack a reward"
        chains.append(role_chain(s, Role.REWARD).after(link))
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
