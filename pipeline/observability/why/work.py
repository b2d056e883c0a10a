"""From work that is not ready to the worker that has it: units, trajectories, evaluations."""

from __future__ import annotations

from pipeline.ledger.admin import Holder, Place, WaitedTrajectory, WaitedUnit, Waits
from pipeline.ledger.types import Unit
from pipeline.observability.status import Health
from pipeline.observability.why.types import Cause, Chain, Outlook, Snapshot, count, seconds, worst
from pipeline.observability.why.workers import (
    absent_chain,
    generators_chain,
    role_absent_chain,
    role_chain,
    scorer_chain,
    worker_chain,
)
from protocol.ids import Role


def unit_chain(s: Snapshot, waits: Waits, unit: WaitedUnit) -> Chain:
    """Return the chain of a unit that is not ready: its trajectory with the gravest outlook."""
    if waits.unit is not Unit.GROUP:
        # Without trajectories, the unit has become complete since.
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
    # Earlier chunks delay nothing yet, unless their scorer is in trouble.
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
    """Return the chain of an incarnation's work."""
    row = s.row(worker)
    left_s = holder.lease_left_s if holder else 0.0
    when = f"when its lease ends in {seconds(left_s)}" if left_s > 0.0 else "at the next lease call of any generator"
    if row is not None and row.epoch <= epoch:
        end = worker_chain(s, row)
        if row.health is Health.LIVE:
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
    """Return the chain of an evaluation's missing responses; None when none is missing."""
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
