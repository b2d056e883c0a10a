"""The escalation of repairs. Pure: times and symptoms are arguments, orders are returned.

    an incident opens ──> tolerate ──it is quiet, then ends──> (passed)
                             │ it lasts; of wrong tokens, after a self-check: what that proves is evicted
                             ▼
    a worker is lost ──> isolate, restart ──work for steady_s──> (repaired)
                             │ no work by the deadline, too many losses, or the incident lasts on
                             ▼
                         replace ──> evict, where others of the role work: until `headrace fleet readmit`
                             │ an eviction would leave the role empty, or exceed the budget
                             ▼
                         role_restart ──> rollback ──> whole_run: the run ends

The supervisor restarts dead and stuck workers by itself (``fleet_plan``, ``watchdog``). The
escalation follows these restarts and orders what comes after them. Only if an incident is the sole
symptom does it order the restart itself. A level that is not possible is skipped, and the reason
recorded.

A worker has at most one open case, and an incident belongs to one case, so an incident evicts at
most one worker, or one sick device or host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pipeline.config.operations import RecoverySection
from pipeline.fleet.repair.budgets import Budgets, PastRepairs
from pipeline.fleet.repair.levels import (
    FINAL,
    LEVELS,
    PROVABLE,
    Abilities,
    Blame,
    IncidentSign,
    Member,
    RepairLevel,
    RepairOrder,
    StepOutcome,
    domain_to_evict,
    is_absent,
    lack_of,
    one_missing,
    others_at_work,
)
from pipeline.fleet.repair.records import StepRow
from protocol.ids import Role


@dataclass(slots=True)
class Case:
    number: int
    worker: str
    role: Role
    level: RepairLevel
    deadline_s: float
    """Deadline of the level; infinite for a final one, and for advice until its incident ends."""
    reason: str
    is_own: bool = False
    """Whether the supervisor saw the loss itself."""
    incidents: set[int] = field(default_factory=set[int])
    """Numbers of its open incidents."""
    quiet: set[int] = field(default_factory=set[int])
    """Those of them with no finding at the moment."""
    num_losses: int = 0
    is_down: bool = False
    """From a loss or an ordered restart until the next start."""
    worked_s: float | None = None
    """When it resumed work; None before."""
    signed_s: float | None = None
    """When its first incident was read; None without one."""
    stood_s: float = 0.0
    """Time from that fault's start, according to the evidence, to the incident."""
    is_provable: bool = False
    is_advised: bool = False
    """The policy allows only advice, or a person decides: no more orders."""

    @property
    def is_quiet(self) -> bool:
        """Whether none of its incidents has a finding at the moment."""
        return bool(self.incidents) and self.incidents <= self.quiet

    @property
    def is_final(self) -> bool:
        return self.level in FINAL

    @property
    def is_suspicion(self) -> bool:
        """Whether nothing was done to the worker yet."""
        return self.level in (RepairLevel.TOLERATE, RepairLevel.SELF_CHECK)

    @property
    def is_repairing(self) -> bool:
        """Whether a repair is in progress and the worker is not seen working yet."""
        return not self.is_suspicion and self.worked_s is None and self.waits

    @property
    def is_out(self) -> bool:
        """Whether the worker cannot be counted on now."""
        is_suspected_only = self.is_suspicion or (self.is_advised and not self.is_own)
        return self.is_down or (self.worked_s is None and not is_suspected_only)

    @property
    def is_unmended(self) -> bool:
        """Whether an incident is still open after a restart that it caused."""
        return bool(self.incidents) and not self.is_suspicion and not self.is_advised

    @property
    def waits(self) -> bool:
        return not math.isinf(self.deadline_s)


def out(cases: Iterable[Case]) -> set[str]:
    """Return workers that cannot be counted on now."""
    return {case.worker for case in cases if case.is_out}


def sick(cases: Iterable[Case]) -> set[str]:
    """Return workers that cannot be counted on now, or that no restart has repaired so far."""
    return {case.worker for case in cases if case.is_out or case.is_unmended}


def taken_down(case: Case, cases: Iterable[Case]) -> tuple[str, ...]:
    """Mark the workers of a case's role that need repair as going down; return those that were not
    yet."""
    found = [one for one in cases if one is case or (one.role is case.role and one.is_out and not one.is_final)]
    workers = tuple(one.worker for one in found if not one.is_down)
    for one in found:
        one.is_down = True
    return workers


_SELF_CHECK_S: Final = 90.0
_NONE = Abilities()


class Escalation:
    def __init__(self, limits: RecoverySection, restart_timeout_s: float, *, next_case: int = 1) -> None:
        """``restart_timeout_s``: allowed time from a loss, a start or loading progress until work.
        ``next_case``: number of the next case, after those of earlier supervisors."""
        self._policy, self._limits, self._restart_timeout_s = limits.policy, limits, restart_timeout_s
        self._next = next_case
        self._cases: dict[str, Case] = {}
        self._roster: Mapping[str, Member] = {}
        self._abilities = Abilities()
        self._known: dict[int, str] = {}
        """Open incidents already read, each with the worker of its case, or ""."""
        self._blame = Blame(limits.link_alarms, limits.link_window_s)
        self._budgets = Budgets(limits)
        self._steps: list[StepRow] = []
        self._orders: list[RepairOrder] = []

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(self._cases.values())

    def taken_steps(self) -> list[StepRow]:
        """Return the steps since the last call, to be recorded with their time."""
        steps, self._steps = self._steps, []
        return steps

    def recall(self, now_s: float, past: PastRepairs) -> None:
        """Count the budgets that earlier supervisors have used. Call it first."""
        self._budgets.recall(now_s, past)

    # -- the supervisor's own observations ---------------------------------------------------------

    def lost(self, now_s: float, worker: str, role: Role, reason: str) -> None:
        """Record that a process ended, froze or hung, and that the supervisor restarts it.

        Until its next start, further exits belong to the same loss. The observer's losses make no
        case, since a run goes on without it."""
        if role is Role.OBSERVER:
            return
        case = self._cases.get(worker)
        if case is None:
            case = self._open(worker, role, RepairLevel.TOLERATE, math.inf, reason)
            case.num_losses = self._budgets.past_losses(worker)
        if case.is_down or (case.is_final and not case.is_advised):
            return
        if not case.is_own:
            # advice about an incident is obsolete now
            case.level = RepairLevel.RESTART if case.is_advised or case.is_suspicion else case.level
            case.is_own, case.is_advised = True, False
        case.is_down, case.worked_s = True, None
        case.reason = reason
        case.num_losses += 1
        if case.level is RepairLevel.REPLACE and case.num_losses <= self._limits.max_repairs:
            case.level = RepairLevel.RESTART
        if case.level in (RepairLevel.RESTART, RepairLevel.REPLACE) and case.num_losses > self._limits.max_repairs:
            self._follow(case, now_s)
            limit = f"none followed by {self._limits.steady_s:g} s of work; {self._limits.max_repairs} are allowed"
            self._hand_on(case, now_s, f"{case.num_losses} losses in a row, {limit}")
            return
        self._follow(case, now_s)
        words = "its epoch is fenced, now or with the ledger's next answer: others continue its work"
        self._note(case, RepairLevel.ISOLATE, StepOutcome.DONE, words)
        self._note(case, case.level, StepOutcome.BEGUN, f"the supervisor starts it again: {reason}", now_s)

    def started(self, now_s: float, worker: str, standby: str = "") -> None:
        """Record the start of a lost worker's process, or that ``standby`` takes over."""
        if (case := self._cases.get(worker)) is not None and not case.is_suspicion:
            case.is_down = False
            self._follow(case, now_s)
            if standby and case.level in (RepairLevel.RESTART, RepairLevel.REPLACE):
                case.level = RepairLevel.REPLACE
                self._note(case, case.level, StepOutcome.BEGUN, f"{standby} takes over, with its model loaded", now_s)

    def moved(self, now_s: float, worker: str) -> None:
        """Record loading progress, which restarts the deadline."""
        if (case := self._cases.get(worker)) is not None and case.is_repairing and not case.is_down:
            self._follow(case, now_s)

    def works(self, now_s: float, worker: str) -> None:
        if (case := self._cases.get(worker)) is not None and case.is_repairing and not case.is_down:
            case.worked_s = now_s
            case.deadline_s = now_s + self._limits.steady_s
            self._note(case, case.level, StepOutcome.DONE, "it works again", now_s)

    def left(self, worker: str) -> None:
        """Close the case of a worker that is no longer wanted."""
        if (case := self._cases.pop(worker, None)) is not None:
            for number in case.incidents:
                self._known[number] = ""

    def _vanished(self, worker: str) -> None:
        """Close the case of a worker that is gone. If its incident is still open when it comes
        back, that opens another case."""
        if (case := self._cases.pop(worker, None)) is not None:
            for number in case.incidents:
                del self._known[number]

    def exhausted(self, now_s: float, worker: str, role: Role, reason: str, *, is_its_own: bool) -> bool:
        """Decide about a worker that must not be restarted: returns True if it is evicted, else the
        run ends.

        Args:
            now_s: The caller's clock.
            worker: Its name.
            role: Its role.
            reason: Why it is not restarted: a budget, or an error that repeats.
            is_its_own: Whether all failures that count were this worker's."""
        case = self._cases.get(worker) or self._open(worker, role, RepairLevel.RESTART, math.inf, reason)
        case.is_own, case.is_down, case.reason = True, True, reason
        if case.level is RepairLevel.EVICT:
            return True
        self._note(case, RepairLevel.RESTART, StepOutcome.FAILED, reason)
        case.level = RepairLevel.EVICT
        if self._evicts(
            case,
            now_s,
            "" if is_its_own else "other workers of the role failed in the same way, so the fault is not its own",
        ):
            return True
        case.level, case.deadline_s = RepairLevel.WHOLE_RUN, math.inf
        self._note(case, RepairLevel.WHOLE_RUN, StepOutcome.BEGUN, f"the run ends: {worker} {reason}")
        return False

    def checked(self, now_s: float, worker: str, found: str) -> None:
        """Record the result of a self-check: the worker proven faulty, or "", and the finding.
        Suspects that are not evicted are restarted if the policy allows."""
        if worker:
            self._proven(now_s, worker, found)
        for case in [case for case in self._cases.values() if case.level is RepairLevel.SELF_CHECK]:
            if case.worker != worker:
                words = f"its answer is not proven wrong: {worker} is faulty, {found}" if worker else found
                self._note(case, RepairLevel.SELF_CHECK, StepOutcome.DONE, words)
            self._restart(case, now_s)

    def _proven(self, now_s: float, worker: str, why: str) -> None:
        member, before = self._roster.get(worker), self._cases.get(worker)
        if member is None or (before is not None and before.is_final):
            return
        case = before or self._open(worker, member.role, RepairLevel.TOLERATE, math.inf, why)
        self._note(case, RepairLevel.SELF_CHECK, StepOutcome.DONE, f"{worker} computes wrongly: {why}")
        reason, case.reason = case.reason, why
        if not self._evicts(case, now_s):
            case.reason = reason
            if before is None:
                self.left(worker)

    # -- incidents ---------------------------------------------------------------------------------

    def see_incidents(self, now_s: float, open_now: Mapping[int, IncidentSign]) -> None:
        """Take in the open incidents by number, noticing new and ended ones."""
        for number in [number for number in self._known if number not in open_now]:
            self._ended(self._known.pop(number), number)
        for number, sign in open_now.items():
            if (case := self._cases.get(self._known.get(number, ""))) is not None:
                self._quiet_or_again(case, now_s, sign)
            # an absent worker may come back, so its incident stays unread until then
            if number not in self._known and not is_absent(sign, self._roster):
                self._known[number] = self._suspect(now_s, sign)

    def _quiet_or_again(self, case: Case, now_s: float, sign: IncidentSign) -> None:
        """Record that a case's incident is quiet, or has findings again."""
        if sign.is_quiet:
            case.quiet.add(sign.number)
        elif sign.number in case.quiet:
            case.quiet.discard(sign.number)
            if case.level is RepairLevel.TOLERATE and case.waits:
                case.deadline_s = now_s + max(0.0, self._limits.tolerate_s - sign.found_s)

    def _suspect(self, now_s: float, sign: IncidentSign) -> str:
        """Open or extend the case for an incident; return its worker, or "" if there is none."""
        worker, reason = self._blame.worker(now_s, sign, self._roster)
        if not worker:
            member = self._roster.get(sign.component)
            role, words = "" if member is None else str(member.role), f"{sign.component} is {sign.kind}; {reason}"
            left = (role, RepairLevel.TOLERATE, StepOutcome.LEFT, f"incident {sign.number}: {words}")
            self._steps.append(StepRow(0.0, 0, sign.component, *left))
            return ""
        case = self._cases.get(worker)
        if case is None:
            deadline_s = now_s + self._limits.tolerate_s
            case = self._open(worker, self._roster[worker].role, RepairLevel.TOLERATE, deadline_s, reason)
            case.signed_s, case.stood_s = now_s, sign.stood_s
            self._note(case, RepairLevel.TOLERATE, StepOutcome.BEGUN, reason, now_s)
        case.incidents.add(sign.number)
        if sign.is_quiet:
            case.quiet.add(sign.number)
        case.is_provable = case.is_provable or sign.kind in PROVABLE
        return worker

    def _ended(self, worker: str, number: int) -> None:
        case = self._cases.get(worker)
        if case is None:
            return
        case.incidents.discard(number)
        case.quiet.discard(number)
        is_waiting = case.is_suspicion or (case.is_advised and not case.is_own)
        if not case.incidents and is_waiting:
            self._note(case, case.level, StepOutcome.DONE, "its incident has ended by itself")
            del self._cases[worker]

    # -- time --------------------------------------------------------------------------------------

    def reset_timers(self, now_s: float, *, only_incidents: bool = False) -> None:
        """Restart deadlines because nothing could be read, or, for incidents only, because no
        observer works."""
        for case in self._cases.values():
            if case.waits and (case.is_suspicion or not only_incidents):
                limits = self._limits
                rests = {RepairLevel.TOLERATE: limits.tolerate_s, RepairLevel.SELF_CHECK: _SELF_CHECK_S}
                rest_s = rests.get(case.level, self._restart_timeout_s)
                case.deadline_s = max(case.deadline_s, now_s + rest_s)

    def tick(self, now_s: float, roster: Mapping[str, Member], abilities: Abilities = _NONE) -> list[RepairOrder]:
        """Return the orders that are due now.

        Args:
            now_s: The caller's clock.
            roster: All running or wanted workers by name. Other workers' cases are closed.
            abilities: Which of the higher levels are possible."""
        self._roster, self._abilities = roster, abilities
        for worker in [worker for worker in self._cases if worker not in roster]:
            self._vanished(worker)
        for case in list(self._cases.values()):
            if now_s >= case.deadline_s:
                self._overdue(case, now_s)
        orders, self._orders = self._orders, []
        return orders

    def failed(self, now_s: float, order: RepairOrder, why: str) -> None:
        """Record that an order could not be carried out; the next level follows."""
        case = self._cases.get(order.worker)
        if case is not None and case.number == order.case and case.level is order.level:
            case.worked_s = None
            self._hand_on(case, now_s, why)

    def _overdue(self, case: Case, now_s: float) -> None:
        if case.level is RepairLevel.TOLERATE and case.is_provable and not case.is_quiet:
            self._self_check(case, now_s)
        elif case.level is RepairLevel.TOLERATE:
            self._restart(case, now_s)
        elif case.level is RepairLevel.SELF_CHECK:
            self._hand_on(case, now_s, f"it has not ended within {_SELF_CHECK_S:g} s")
        elif case.worked_s is None and self._roster[case.worker].is_away:
            words = "its own supervisor has not started it again: the worker has left, or its host is cut off"
            self._note(case, case.level, StepOutcome.LEFT, words)
            self._vanished(case.worker)
        elif case.worked_s is None:
            self._hand_on(case, now_s, f"no work within {self._restart_timeout_s:g} s of its last sign of life")
        elif case.incidents and self._policy == "act":
            rest_s = now_s + self._limits.steady_s if case.is_quiet else now_s
            settled_s = max(case.worked_s + self._limits.settle_s, rest_s)
            if now_s < settled_s:
                case.deadline_s = settled_s
                return
            numbers = ", ".join(str(number) for number in sorted(case.incidents))
            self._hand_on(case, now_s, f"incident {numbers} is still open {self._limits.settle_s:g} s later")
        else:
            self._note(case, case.level, StepOutcome.DONE, f"it has worked for {self._limits.steady_s:g} s: repaired")
            self.left(case.worker)

    # -- the levels ---------------------------------------------------------------------------------

    def _self_check(self, case: Case, now_s: float) -> None:
        """Have all generators compute the same prompts. This is done under every policy."""
        case.level, lack = RepairLevel.SELF_CHECK, self._abilities.no_self_check
        if lack:
            self._note(case, case.level, StepOutcome.SKIPPED, lack)
            self._restart(case, now_s)
            return
        case.deadline_s = now_s + _SELF_CHECK_S
        self._note(case, case.level, StepOutcome.BEGUN, case.reason, now_s)
        self._order(case, (case.worker,))

    def _restart(self, case: Case, now_s: float) -> None:
        """Restart a worker because of incidents alone, if the budget allows; wait instead while
        they are quiet."""
        if case.is_quiet:
            case.level, case.deadline_s = RepairLevel.TOLERATE, now_s + self._limits.tolerate_s
            return
        if not self._acts(case):
            self._advise(case, now_s, RepairLevel.RESTART)
            return
        if not self._budgets.take_restart(now_s, case.worker):
            case.level = RepairLevel.RESTART
            self._hand_on(case, now_s, self._budgets.restarts_used(case.worker))
            return
        case.level, case.is_down, case.worked_s = RepairLevel.RESTART, True, None
        self._follow(case, now_s)
        self._note(case, RepairLevel.ISOLATE, StepOutcome.BEGUN, "its epoch is fenced: others continue its work")
        self._note(case, RepairLevel.RESTART, StepOutcome.BEGUN, case.reason, now_s)
        localise_s = 0.0 if case.signed_s is None else now_s - case.signed_s
        self._order(case, (case.worker,), detect_s=case.stood_s, localise_s=localise_s)

    def _hand_on(self, case: Case, now_s: float, why: str) -> None:
        """Move the case to the next level that is possible."""
        if case.is_advised:
            self._follow(case, now_s)
            return
        self._note(case, case.level, StepOutcome.FAILED, why)
        if case.level is RepairLevel.SELF_CHECK:
            self._restart(case, now_s)
            return
        case.reason = why
        for level in LEVELS[LEVELS.index(case.level) + 1 :]:
            case.level = level
            if self._climbed(case, level, now_s):
                return

    def _climbed(self, case: Case, level: RepairLevel, now_s: float) -> bool:
        """Try a level; return whether the case stays on it."""
        if lack := lack_of(level, case.worker, self._roster, self._abilities):
            self._note(case, level, StepOutcome.SKIPPED, lack)
            return False
        if level is RepairLevel.EVICT and (refusal := self._refusal(case, now_s)):
            self._note(case, level, StepOutcome.REFUSED, refusal)
            return False
        if level is RepairLevel.WHOLE_RUN and (why := self._goes_on(case)):
            self._advise(case, now_s, level, StepOutcome.LEFT, f"{why}: a person decides")
            return True
        if not self._acts(case):
            self._advise(case, now_s, level)
            return True
        if level is RepairLevel.ROLE_RESTART and not case.is_own and not self._budgets.take_restart(now_s, case.worker):
            self._note(case, level, StepOutcome.REFUSED, self._budgets.restarts_used(case.worker))
            return False
        if level is RepairLevel.EVICT:
            self._evict(case, now_s)
            return True
        case.worked_s = None
        workers = taken_down(case, self._cases.values()) if level is RepairLevel.ROLE_RESTART else (case.worker,)
        # the exit that such an order causes is not another loss
        case.is_down = case.is_down or level in (RepairLevel.REPLACE, RepairLevel.ROLLBACK)
        case.deadline_s = math.inf if level is RepairLevel.WHOLE_RUN else now_s + self._restart_timeout_s
        self._note(case, level, StepOutcome.BEGUN, case.reason, now_s)
        self._order(case, workers)
        return True

    def _advise(
        self, case: Case, now_s: float, level: RepairLevel, outcome: StepOutcome = StepOutcome.ADVISED, why: str = ""
    ) -> None:
        """Advise the next repair, once. The supervisor's own restarts of the worker continue."""
        words = f"recovery.policy is {self._policy}; `act` would do this now"
        self._note(case, level, outcome, f"{why or words}: {case.reason}")
        case.is_advised = True
        case.level, case.deadline_s = RepairLevel.RESTART, math.inf
        if case.is_own:
            self._follow(case, now_s)
        elif not case.incidents:
            self.left(case.worker)

    def _evicts(self, case: Case, now_s: float, refusal: str = "") -> bool:
        """Evict a proven or exhausted worker, unless there is a refusal or the policy is to advise."""
        if refusal := refusal or self._refusal(case, now_s):
            self._note(case, RepairLevel.EVICT, StepOutcome.REFUSED, refusal)
        elif self._policy == "advise":
            words = "recovery.policy is advise; otherwise it would be evicted"
            self._note(case, RepairLevel.EVICT, StepOutcome.ADVISED, words)
        else:
            self._evict(case, now_s)
            return True
        return False

    def _evict(self, case: Case, now_s: float) -> None:
        case.level, case.deadline_s = RepairLevel.EVICT, math.inf
        self._budgets.take_eviction(now_s)
        domain = domain_to_evict(case.worker, self._roster, sick(self._cases.values()) | {case.worker})
        words = f"evicted with {domain.words}" if domain.words else "evicted"
        back = (f"--host {domain.host}",) if domain.host else domain.workers
        until = " and ".join(f"`headrace fleet readmit {one}`" for one in back) + " takes it back"
        self._note(case, RepairLevel.EVICT, StepOutcome.BEGUN, f"{words}: {case.reason}; {until}")
        for mate in (self._cases[name] for name in domain.workers if name in self._cases and name != case.worker):
            mate.level, mate.deadline_s = RepairLevel.EVICT, math.inf
            self._note(mate, RepairLevel.EVICT, StepOutcome.DONE, f"evicted with {domain.words}, by case {case.number}")
        self._order(case, domain.workers, host=domain.host)

    def _refusal(self, case: Case, now_s: float) -> str:
        """Say why a worker must not be evicted, or ""."""
        others = others_at_work(case.worker, case.role, self._roster, out(self._cases.values()))
        return self._budgets.evictions_used(now_s) if others else one_missing(case.role)

    def _goes_on(self, case: Case) -> str:
        if not case.is_own:
            return "incidents alone do not end a run"
        others = others_at_work(case.worker, case.role, self._roster, out(self._cases.values()))
        return f"the run goes on with {len(others)} other {case.role} at work" if others else ""

    def _acts(self, case: Case) -> bool:
        return self._policy == "act" or (self._policy == "own_signs" and case.is_own)

    # -- records -----------------------------------------------------------------------------------

    def _open(self, worker: str, role: Role, level: RepairLevel, deadline_s: float, reason: str) -> Case:
        case = self._cases[worker] = Case(self._next, worker, role, level, deadline_s, reason)
        self._next += 1
        return case

    def _note(
        self, case: Case, level: RepairLevel, outcome: StepOutcome, words: str, now_s: float | None = None
    ) -> None:
        """Record a step of a case. ``now_s``: to record how long the case's deadline is away."""
        limit_s = None if now_s is None or not case.waits else case.deadline_s - now_s
        self._steps.append(StepRow(0.0, case.number, case.worker, str(case.role), level, outcome, words, limit_s))

    def _order(
        self,
        case: Case,
        workers: tuple[str, ...],
        host: str = "",
        *,
        detect_s: float = 0.0,
        localise_s: float = 0.0,
    ) -> None:
        """Order the level of a case."""
        place = (case.level, case.number, case.worker, case.reason, case.deadline_s, workers, host)
        self._orders.append(RepairOrder(*place, detect_s, localise_s))

    def _follow(self, case: Case, now_s: float) -> None:
        """Restart the deadline of a repair."""
        if not case.is_final and (case.is_own or not case.is_advised):
            case.deadline_s = now_s + self._restart_timeout_s
