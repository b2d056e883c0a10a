"""The invariants that hold under every fault: each is a pure function from a finished run's events to the
violations.

Each invariant has a test with a history that breaks it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ops.drill.causes import healthy_are_kept, innocents_are_not_blamed, junk_is_named, orders_hold
from ops.drill.events import (
    Admitted,
    Answered,
    Audited,
    Beat,
    Checkpointed,
    Claimed,
    Crashed,
    Ended,
    Ending,
    EndOrdered,
    Epoch,
    Event,
    Finished,
    Found,
    Held,
    Killed,
    Left,
    Limits,
    NotStored,
    Published,
    Sampled,
    ServerLogged,
    Serving,
    Stalled,
    Status,
    Stored,
    SupervisorEnded,
    Tally,
    Updated,
)
from ops.drill.judged import answers_are_true, dead_letters_were_tried, trained_are_judged
from pipeline.ledger.types import DropReason
from pipeline.process.exit_codes import ExitCode

_FATES = {"trained"} | {f"dropped:{reason}" for reason in DropReason}
_UNTRAINED_IN_CLAIM = {
    f"dropped:{reason}" for reason in (DropReason.NON_FINITE, DropReason.VALUE_WARMUP, DropReason.DEAD_LETTER)
}
"""A group is claimed with its members that have no verdict."""
_MOST_SHOWN = 5
_RUNNING, _STOPPING, _FINISHED = "running", "stopping", "finished"
_EXIT_CODES = {Ending.KILL: (-9,), Ending.HANGUP: (0,), Ending.DOWN_STARTING: (0, ExitCode.INTERRUPTED)}
_WORDS = {Ending.HANGUP: ("signal",), Ending.DOWN: ("down",), Ending.DOWN_STARTING: ("down", "signal")}
"""The run's last state must contain one of these words after such an end."""
_CERTAIN = frozenset({Ending.HANGUP, Ending.DOWN})
"""Ends that always leave a state. A start that is stopped before the ledger's server answers leaves none."""


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    detail: str


@dataclass(frozen=True, slots=True)
class KillCost:
    """The cost of one generator's death."""

    worker: str
    pid: int
    num_in_flight: int
    """Trajectories that lost tokens."""
    num_lost: int
    """Tokens that it sampled and never stored."""
    num_sampled_again: int
    """Lost tokens that were sampled again."""


def check(events: Sequence[Event], limits: Limits) -> list[Violation]:
    """Return the violations, at most a few of each kind."""
    violations: list[Violation] = []
    for name, invariant in INVARIANTS.items():
        details = list(invariant(events, limits))
        violations += [Violation(name, detail) for detail in details[:_MOST_SHOWN]]
        if len(details) > _MOST_SHOWN:
            violations.append(Violation(name, f"... {len(details) - _MOST_SHOWN} more"))
    return violations


def one_end(events: Sequence[Event], limits: Limits) -> Found:
    """Every admitted trajectory ends, once, for a known reason, and nothing happens to it afterwards."""
    admitted: set[str] = set()
    ended: dict[str, str] = {}
    for event in events:
        match event:
            case Admitted(group):
                admitted.update(f"t.{group}.{member}" for member in range(limits.group_size))
            case Ended(name, fate):
                if fate not in _FATES:
                    yield f"{name} ended as {fate!r}"
                if name in ended:
                    yield f"{name} ended twice: {ended[name]}, then {fate}"
                ended[name] = fate
            case Stored() | Held() if event.trajectory in ended:
                yield f"{event} after {event.trajectory} had ended as {ended[event.trajectory]}"
            case _:
                pass
    trajectories = {name for name in ended if name.count(".") == 2}
    for name in sorted(admitted - trajectories):
        yield f"{name} was admitted and never ended"
    for name in sorted(trajectories - admitted):
        yield f"{name} ended and was never admitted"


def one_commit(events: Sequence[Event], _: Limits) -> Found:
    """The checkpoints hold the same chunks as the ledger counts as trained, each in exactly one batch of one
    checkpoint."""
    claims = {event.claim: event.units for event in events if isinstance(event, Claimed)}
    committed: dict[str, str] = {}
    seen: dict[str, str] = {}
    for event in events:
        if not isinstance(event, Checkpointed):
            continue
        for claim in event.claims:
            if claim in seen:
                yield f"claim {claim} is in checkpoints {seen[claim]} and {event.name}"
            seen[claim] = event.name
            if claim not in claims:
                yield f"checkpoint {event.name} holds claim {claim}, which the ledger never gave"
            for unit in claims.get(claim, ()):
                if unit in committed and committed[unit] != claim:
                    yield f"unit {unit} was trained in {committed[unit]} and in {claim}"
                committed[unit] = claim
    stored = {event.chunk for event in events if isinstance(event, Stored)}
    fates = {event.name: event.fate for event in events if isinstance(event, Ended) and event.name in stored}
    for chunk in sorted(stored):
        fate = fates.get(chunk, "nothing")
        unit = next((name for name in _units_of(chunk) if name in committed), None)
        if fate == "trained" and unit is None:
            yield f"chunk {chunk} counts as trained and is in no checkpoint"
        if fate != "trained" and unit is not None and fate not in _UNTRAINED_IN_CLAIM:
            yield f"chunk {chunk} is in the checkpoint of claim {committed[unit]} and ended as {fate}"


def stored_once(events: Sequence[Event], _: Limits) -> Found:
    """Every chunk is stored once, the chunks of a trajectory adjoin, and every token is the one that belongs
    there."""
    reached: dict[str, int] = {}
    seen: set[str] = set()
    for event in events:
        if isinstance(event, Answered):
            reached[event.trajectory] = 0 if event.num_tokens is None else reached[event.trajectory] + event.num_tokens
        if not isinstance(event, Stored):
            continue
        if event.chunk in seen:
            yield f"chunk {event.chunk} was stored twice"
        seen.add(event.chunk)
        if event.begin != reached.get(event.trajectory, 0):
            yield f"{event.chunk} begins at {event.begin}, the trajectory had reached {reached.get(event.trajectory, 0)}"
        reached[event.trajectory] = event.end
        if event.is_true is False:
            yield f"{event.chunk} by {event.who} has other tokens than its trajectory's stream"


def versions_grow(events: Sequence[Event], _: Limits) -> Found:
    """Announced policy versions only grow, and so do those in the learner's history."""
    for kind in (Published, Updated):
        newest = -1
        for event in events:
            if isinstance(event, kind):
                if event.version <= newest:
                    yield f"{event} after version {newest}"
                newest = event.version


def never_stale(events: Sequence[Event], limits: Limits) -> Found:
    """No token of a batch is older than eta versions, and none is younger than the published version."""
    newest = -1
    for event in events:
        match event:
            case Published(version):
                newest = version
            case Stored() if event.newest > newest:
                yield f"{event.chunk} holds tokens of version {event.newest}, the newest published was {newest}"
            case Claimed() if event.staleness > limits.eta:
                yield f"{event.claim} of version {event.version} holds a token {event.staleness} updates old; eta {limits.eta}"
            case Updated() if event.staleness > limits.eta:
                yield f"update {event.update} trained a token {event.staleness} versions old; eta is {limits.eta}"
            case _:
                pass


def fenced_is_powerless(events: Sequence[Event], _: Limits) -> Found:
    """Every write, lease, claim and heartbeat comes from its worker's newest incarnation."""
    epochs: dict[str, int | None] = {}
    last: dict[str, int] = {}
    for event in events:
        match event:
            case Epoch(worker, epoch):
                epochs[worker] = epoch
                if epoch is None:
                    continue
                if epoch <= (before := last.get(worker, 0)):
                    yield f"epoch of {worker} went from {before} to {epoch}"
                last[worker] = epoch
            case Stored() | Held() | Beat():
                yield from _fenced(event.who, event, epochs)
            case Claimed():
                yield from _fenced(event.claim.partition("/")[0], event, epochs)
            case _:
                pass


def everything_moves(events: Sequence[Event], _: Limits) -> Found:
    """No wait is endless, no worker ends by an unexpected error, and the run ends well."""
    for event in events:
        match event:
            case Stalled(text):
                yield text
            case Crashed(worker, error):
                yield f"{worker} crashed: {error}"
            case Finished(exit_code) if exit_code != 0:
                yield f"the run ended with exit code {exit_code}"
            case _:
                pass
    if not any(isinstance(event, Finished) for event in events):
        yield "the run did not end"


def buffers_are_bounded(events: Sequence[Event], limits: Limits) -> Found:
    """Credit, slots and memory stay within their limits. When a rolled-back learner lowers the limit of credit,
    nothing is added."""
    used = 0
    for event in events:
        match event:
            case Tally():
                if event.used > max(event.limit, used):
                    yield f"credit {event.used} of {event.limit}"
                used = event.used
            case Beat() if event.num_live > limits.num_slots:
                yield f"{event.who} has {event.num_live} live requests for {limits.num_slots} slots"
            case Beat() if event.rss_bytes > limits.max_rss_bytes:
                yield f"{event.who} holds {event.rss_bytes >> 20} MB, limit {limits.max_rss_bytes >> 20}"
            case _:
                pass


def it_balances(events: Sequence[Event], _: Limits) -> Found:
    """Admitted = trained + dropped + in flight after every transition, and nothing is in flight at the end."""
    for event in events:
        match event:
            case Tally() if event.groups_missing:
                yield f"{event.groups_missing} groups are missing after a transition"
            case Audited() if not event.balances:
                yield f"the audit does not balance: {event.text}"
            case _:
                pass
    last = next((event for event in reversed(events) if isinstance(event, Audited)), None)
    if last is None:
        yield "the ledger was never audited"
    elif last.in_flight:
        yield f"{last.in_flight} trajectories are in flight after the end: {last.text}"


def kills_are_cheap(events: Sequence[Event], limits: Limits) -> Found:
    """A killed generator loses at most one window of each trajectory."""
    for (worker, pid, trajectory), (num_lost, _) in _losses(events).items():
        if num_lost > limits.window_tokens:
            yield f"{worker} ({pid}) lost {num_lost} tokens of {trajectory}; a window has {limits.window_tokens} tokens"


def one_server(events: Sequence[Event], _: Limits) -> Found:
    """Two servers never work on one file, neither at one moment nor once a successor has begun."""
    logged: list[int] = []
    for event in events:
        match event:
            case Serving(pids) if len(pids) > 1:
                yield f"processes {', '.join(map(str, pids))} served one file at one time"
            case ServerLogged(pid):
                if pid in logged:
                    yield f"server {pid} continued after server {logged[-1]} had begun"
                logged.append(pid)
            case _:
                pass


def true_ends(events: Sequence[Event], limits: Limits) -> Found:
    """A run never fails, stops on request with that as its state, and finishes with all its updates.

    A run whose learner had made all updates before the request may finish instead of stopping."""
    endings = [event for event in events if isinstance(event, EndOrdered)]
    told = [event.how for event in endings]
    ended = [event.exit_code for event in events if isinstance(event, SupervisorEnded)]
    expected = [_EXIT_CODES[how] for how in told if how in _EXIT_CODES]
    if len(ended) != len(expected) or any(code not in codes for code, codes in zip(ended, expected, strict=True)):
        yield f"supervisors ended with {ended}; after {[str(how) for how in told]} expected {expected}"
    states = [event for event in events if isinstance(event, Status)]
    reasons = [how for how in told if how in _WORDS]
    num_certain = sum(event.how in _CERTAIN and event.version < limits.num_updates for event in endings)
    stops = [
        one for one, before in zip(states, [None, *states], strict=False) if one.state == _STOPPING != _state(before)
    ]
    for status in states:
        if status.state not in (_RUNNING, _STOPPING, _FINISHED):
            yield f"the run was declared {status.state}: {status.detail}"
    if not num_certain <= len(stops) <= len(reasons):
        details = "; ".join(one.detail for one in stops)
        yield f"the run was stopped {len(stops)} times ({details}), by order {len(reasons)} times"
    for stop in stops[: len(reasons)]:
        while len(reasons) > 1 and reasons[0] not in _CERTAIN and not _explains(reasons[0], stop):
            del reasons[0]
        if not _explains(reason := reasons.pop(0), stop):
            yield f"the run stopped with {stop.detail!r}, expected something about {' or '.join(map(repr, _WORDS[reason]))}"
    if not any(isinstance(event, Finished) for event in events):
        # another invariant reports it
        return
    if not states or states[-1].state != _FINISHED:
        yield f"the run's last state is {f'{states[-1].state}: {states[-1].detail}' if states else 'not known'}"
    newest = max((event.version for event in events if isinstance(event, Updated)), default=0)
    if newest < limits.num_updates:
        yield f"the run ended at version {newest} of {limits.num_updates}: {states[-1].detail if states else ''}"


def _state(status: Status | None) -> str:
    return "" if status is None else status.state


def _explains(how: Ending, stop: Status) -> bool:
    return any(word in stop.detail for word in _WORDS[how])


def nothing_is_left(events: Sequence[Event], _: Limits) -> Found:
    """After an end no process, shared memory, socket, held lock or temporary folder of the run remains."""
    for event in events:
        if isinstance(event, Left):
            yield f"after {event.after}: {event.what}"


INVARIANTS: dict[str, Callable[[Sequence[Event], Limits], Found]] = {
    "one end": one_end,
    "one commit": one_commit,
    "stored once": stored_once,
    "versions grow": versions_grow,
    "never stale": never_stale,
    "fenced is powerless": fenced_is_powerless,
    "everything moves": everything_moves,
    "buffers are bounded": buffers_are_bounded,
    "it balances": it_balances,
    "kills are cheap": kills_are_cheap,
    "one server": one_server,
    "true ends": true_ends,
    "healthy are kept": healthy_are_kept,
    "nothing is left": nothing_is_left,
    "trained are judged": trained_are_judged,
    "answers are true": answers_are_true,
    "dead letters were tried": dead_letters_were_tried,
    "innocents are not blamed": innocents_are_not_blamed,
    "orders hold": orders_hold,
    "junk is named": junk_is_named,
}


def kill_costs(events: Sequence[Event]) -> list[KillCost]:
    """Return the cost of each generator's death; 0 for engines without a journal."""
    costs: dict[tuple[str, int], list[int]] = {
        (event.worker, event.pid): [0, 0, 0]
        for event in events
        if isinstance(event, Killed) and event.worker.startswith("generator")
    }
    for (worker, pid, _), (num_lost, num_again) in _losses(events).items():
        sums = costs[worker, pid]
        sums[0] += num_lost > 0
        sums[1] += num_lost
        sums[2] += num_again
    return [KillCost(worker, pid, *sums) for (worker, pid), sums in costs.items()]


def _losses(events: Iterable[Event]) -> dict[tuple[str, int, str], tuple[int, int]]:
    """Return, by killed generator and trajectory, how many tokens it sampled and did not store, and how many of
    those were sampled again."""
    killed = {event.pid: event.worker for event in events if isinstance(event, Killed)}
    pids = {event.who: event.pid for event in events if isinstance(event, Beat)}
    sampled: dict[tuple[int, str], list[range]] = defaultdict(list)
    stored: dict[tuple[int, str], set[int]] = defaultdict(set)
    times: dict[str, Counter[int]] = defaultdict(Counter)
    for event in events:
        match event:
            case Sampled(pid, trajectory, begin, end):
                sampled[pid, trajectory].append(range(begin, end))
                times[trajectory].update(range(begin, end))
            case Stored() | NotStored() if event.who in pids:
                # what the ledger refused was lost before the kill
                stored[pids[event.who], event.trajectory].update(range(event.begin, event.end))
            case _:
                pass
    losses: dict[tuple[str, int, str], tuple[int, int]] = {}
    for (pid, trajectory), stretches in sampled.items():
        if pid in killed:
            lost = {place for stretch in stretches for place in stretch} - stored[pid, trajectory]
            again = sum(times[trajectory][place] > 1 for place in lost)
            losses[killed[pid], pid, trajectory] = (len(lost), again)
    return losses


def _units_of(chunk: str) -> tuple[str, str, str]:
    """Return the names under which a chunk may be claimed: itself, its trajectory, its group."""
    trajectory = chunk.rpartition(".")[0]
    return chunk, trajectory, chunk.split(".")[1]


def _fenced(who: str, event: Event, epochs: Mapping[str, int | None]) -> Found:
    worker, _, epoch = who.partition("#")
    if int(epoch) != epochs.get(worker):
        yield f"{event} while the newest epoch of {worker} was {epochs.get(worker)}"
