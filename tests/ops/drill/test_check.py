"""Claims about the check itself: a sound history passes, and for every invariant a history that
breaks it is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ops.drill.check import INVARIANTS, KillCost, Limits, check, kill_costs
from ops.drill.events import (
    Admitted,
    Answered,
    Audited,
    Beat,
    Blamed,
    Checkpointed,
    Claimed,
    Crashed,
    DeadLetter,
    Ended,
    Ending,
    EndOrdered,
    Epoch,
    Event,
    Faulted,
    Finished,
    HealthySpan,
    Held,
    Judged,
    Killed,
    Left,
    Lost,
    NotScored,
    NotStored,
    OrderResult,
    Published,
    Repaired,
    Sampled,
    ServerLogged,
    Serving,
    Settled,
    Stalled,
    Status,
    Stored,
    SupervisorEnded,
    Tally,
    UnreportedJunk,
    Updated,
)
from ops.drill.judged import dead_letters_were_tried

LIMITS = Limits(eta=1, group_size=2, num_slots=4, window_tokens=8, num_updates=1, max_attempts=2)
G, H = "generator-0#1", "generator-0#2"


def stored(name: str, begin: int, end: int, *, who: str = G, version: int = 0, final: bool = False) -> Stored:
    trajectory = name.rpartition(".")[0]
    true = 1.0 if final else None
    return Stored(name, trajectory, who, begin, end, version, version, is_final=final, is_true=True, verdict=true)


SOUND: tuple[Event, ...] = (
    Status("running", ""),
    Epoch("learner", 1),
    Epoch("generator-0", 1),
    Beat(G, 11, 0, 1 << 20),
    Published(0),
    Admitted(0),
    Admitted(1),
    Tally(4, 8, 0),
    *(Held(f"t.{group}.{member}", G) for group in (0, 1) for member in (0, 1)),
    stored("t.0.0.0", 0, 8),
    Answered("t.0.0.0", "t.0.0", 0, None, ""),
    stored("t.0.1.0", 0, 5, final=True),
    NotScored("t.0.1.0", "reward"),
    Judged("t.0.1.0", 1.0),
    stored("t.1.0.0", 0, 6, final=True),
    stored("t.1.1.0", 0, 7, final=True),
    *(Ended(name, "dropped:no_signal") for name in ("t.1.0.0", "t.1.0", "t.1.1.0", "t.1.1")),
    Epoch("generator-0", 2),
    Beat(H, 12, 1, 1 << 20),
    Held("t.0.0", H),
    stored("t.0.0.1", 8, 11, who=H, final=True),
    Answered("t.0.0.1", "t.0.0", 0, 1.0, ""),
    Judged("t.0.0.1", 1.0),
    Claimed("learner#1/a", 1, ("0",), 0),
    Published(1),
    Settled("learner#1/a"),
    *(Ended(name, "trained") for name in ("t.0.0.0", "t.0.0.1", "t.0.0", "t.0.1.0", "t.0.1")),
    Tally(4, 12, 0),
    Status("stopping", "stopped by a signal"),
    Status("stopping", "stopped by a signal"),
    Status("running", ""),
    Status("stopping", "stopped by `headrace down`"),
    Status("running", ""),
    Status("finished", "1 updates done"),
    Checkpointed("000001.version-1", 1, 1, ("learner#1/a",)),
    Updated(1, 1, 1),
    Killed("generator-0", 11),
    Sampled(11, "t.0.0", 0, 8),
    Sampled(11, "t.0.0", 8, 10),
    Sampled(12, "t.0.0", 8, 11),
    ServerLogged(21),
    ServerLogged(22),
    EndOrdered(Ending.HANGUP),
    SupervisorEnded(0),
    EndOrdered(Ending.KILL),
    SupervisorEnded(-9),
    EndOrdered(Ending.DOWN),
    Faulted("generator-0", 10.0, 12.0),
    Serving((21,)),
    Serving(()),
    Serving((22,)),
    Lost("generator-0", "worker_replaced", "no heartbeat for 5 s", 12.5),
    Repaired("generator-0", "no heartbeat for 5 s"),
    HealthySpan(1000.0, 1050.0),
    Blamed("reward-0", "it is slow", 999.0),
    Blamed("ledger", "it is slow", 1001.0),
    OrderResult("`headrace down` during a start", held=True, found=""),
    Audited(balances=True, in_flight=0, text=""),
    Finished(0),
)


def before(kind: type, *events: Event) -> Callable[[Sequence[Event]], list[Event]]:
    """Put events before the last of a kind."""

    def tamper(sound: Sequence[Event]) -> list[Event]:
        at = max(i for i, event in enumerate(sound) if isinstance(event, kind))
        return [*sound[:at], *events, *sound[at:]]

    return tamper


def without(unwanted: Callable[[Event], bool]) -> Callable[[Sequence[Event]], list[Event]]:
    return lambda sound: [event for event in sound if not unwanted(event)]


def changed(kind: type, *, last: bool = True, **fields: object) -> Callable[[Sequence[Event]], list[Event]]:
    """Change fields of the last (or first) event of a kind."""

    def tamper(sound: Sequence[Event]) -> list[Event]:
        found = [i for i, event in enumerate(sound) if isinstance(event, kind)]
        at = found[-1 if last else 0]
        return [*sound[:at], replace(sound[at], **fields), *sound[at + 1 :]]  # type: ignore[type-var]

    return tamper


TAMPERED: list[tuple[str, Callable[[Sequence[Event]], list[Event]], str]] = [
    ("one end", without(lambda e: e == Ended("t.0.1", "trained")), "t.0.1 was admitted and never ended"),
    ("one end", before(Audited, Ended("t.0.0", "dropped:stale")), "ended twice: trained, then dropped:stale"),
    ("one end", before(Audited, Ended("t.9.0", "trained")), "never admitted"),
    ("one end", before(Audited, Held("t.0.0", H)), "had ended as trained"),
    ("one end", before(Audited, stored("t.1.1.1", 7, 9, who=H)), "had ended as dropped:no_signal"),
    ("one end", changed(Ended, fate="without a reason"), "ended as 'without a reason'"),
    ("one commit", without(lambda e: isinstance(e, Checkpointed)), "is in no checkpoint"),
    ("one commit", before(Audited, Checkpointed("2", 2, 2, ("learner#1/a",))), "is in checkpoints"),
    ("one commit", before(Audited, Checkpointed("2", 2, 2, ("learner#1/z",))), "which the ledger never gave"),
    (
        "one commit",
        before(Audited, Claimed("learner#1/b", 1, ("0",), 0), Checkpointed("2", 2, 2, ("learner#1/b",))),
        "unit 0 was trained in learner#1/a and in learner#1/b",
    ),
    (
        "one commit",
        before(Audited, Claimed("learner#1/b", 1, ("1",), 0), Checkpointed("2", 2, 2, ("learner#1/b",))),
        "ended as dropped:no_signal",
    ),
    ("stored once", before(Claimed, stored("t.0.0.1", 11, 12, who=H)), "was stored twice"),
    ("stored once", changed(Stored, begin=9), "begins at 9, the trajectory had reached 8"),
    ("stored once", changed(Stored, begin=7), "begins at 7, the trajectory had reached 8"),
    ("stored once", changed(Stored, is_true=False), "other tokens"),
    ("stored once", changed(Answered, last=False, num_tokens=3), "begins at 8, the trajectory had reached 11"),
    ("answers are true", changed(Answered, fault="was answered '2'"), "t.0.0.1: was answered '2'"),
    ("answers are true", before(Audited, Answered("t.0.0.0", "t.0.0", 0, None, "")), "t.0.0.0 was answered twice"),
    ("trained are judged", changed(Answered, accuracy=0.0), "t.0.0.1 was judged 1, but its verifier's verdict is 0"),
    ("versions grow", before(Updated, Published(1)), "after version 1"),
    ("versions grow", before(Audited, Updated(2, 1, 0)), "after version 1"),
    ("never stale", changed(Claimed, staleness=2), "2 updates old; eta 1"),
    ("never stale", changed(Updated, staleness=2), "2 versions old"),
    ("never stale", changed(Stored, newest=1), "the newest published was 0"),
    ("fenced is powerless", changed(Stored, who=G), "newest epoch of generator-0 was 2"),
    ("fenced is powerless", before(Claimed, Held("t.0.1", G)), "newest epoch of generator-0 was 2"),
    ("fenced is powerless", before(Claimed, Beat(G, 11, 0, 0)), "newest epoch of generator-0 was 2"),
    ("fenced is powerless", before(Claimed, Epoch("learner", 2)), "newest epoch of learner was 2"),
    ("fenced is powerless", before(Claimed, Epoch("generator-0", 1)), "went from 2 to 1"),
    ("everything moves", before(Finished, Stalled("no update for 60 s")), "no update for 60 s"),
    ("everything moves", before(Finished, Crashed("learner", "KeyError")), "KeyError"),
    ("everything moves", changed(Finished, exit_code=3), "exit code 3"),
    ("everything moves", without(lambda e: isinstance(e, Finished)), "did not end"),
    ("buffers are bounded", changed(Tally, used=13), "credit 13 of 12"),
    ("buffers are bounded", changed(Beat, num_live=5), "5 live requests for 4 slots"),
    ("buffers are bounded", changed(Beat, rss_bytes=2 << 30), "2048 MB"),
    ("it balances", changed(Tally, groups_missing=1), "1 groups are missing"),
    ("it balances", changed(Audited, balances=False, text="groups 1"), "does not balance: groups 1"),
    ("it balances", changed(Audited, in_flight=3), "3 trajectories are in flight"),
    ("it balances", without(lambda e: isinstance(e, Audited)), "never audited"),
    ("one server", before(Audited, Serving((22, 23))), "processes 22, 23 served one file"),
    ("one server", before(Audited, ServerLogged(21)), "server 21 continued after server 22 had begun"),
    ("true ends", before(Audited, SupervisorEnded(1)), "supervisors ended with [0, -9, 1]"),
    ("true ends", changed(SupervisorEnded, last=False, exit_code=-1), "supervisors ended with [-1, -9]"),
    ("true ends", before(Audited, Status("failed", "321 groups")), "declared failed: 321 groups"),
    ("true ends", before(Checkpointed, Status("running", ""), Status("stopping", "a signal")), "stopped 3 times"),
    ("true ends", without(lambda e: e == Status("stopping", "stopped by a signal")), "stopped 1 times"),
    ("true ends", without(lambda e: e == EndOrdered(Ending.DOWN)), "stopped by `headrace down`), by order 1 times"),
    (
        "true ends",
        lambda sound: [replace(e, detail="no data") if isinstance(e, Status) else e for e in sound],
        "expected something about 'signal'",
    ),
    ("true ends", changed(Status, state="running"), "last state is running"),
    ("true ends", changed(Updated, version=0), "ended at version 0 of 1"),
    ("healthy are kept", changed(Lost, worker="learner"), "learner: worker replaced, though nothing"),
    ("healthy are kept", changed(Lost, at_s=9.0), "generator-0: worker replaced, though nothing"),
    ("healthy are kept", changed(Lost, at_s=20.0), "generator-0: worker replaced, though nothing"),
    ("healthy are kept", before(Audited, Lost("value", "worker_evicted", "x", 11.0)), "value: worker evicted, though"),
    ("healthy are kept", changed(Repaired, worker="value"), "value was repaired, though nothing had been done to it"),
    ("trained are judged", without(lambda e: e == Judged("t.0.1.0", 1.0)), "t.0.1.0 was trained on without a verdict"),
    ("trained are judged", changed(Judged, accuracy=0.0), "t.0.0.1 was judged 0, but its verifier's verdict is 1"),
    ("dead letters were tried", before(Claimed, DeadLetter("t.0.1.0", "reward")), "after 1 of 2 tries at its reward"),
    (
        "dead letters were tried",
        lambda sound: [
            replace(e, fate="dropped:dead_letter") if e == Ended("t.1.1", "dropped:no_signal") else e for e in sound
        ],
        "t.1.1 ended as a dead letter, though 2 of its group had or might",
    ),
    (
        "innocents are not blamed",
        changed(Blamed, component="reward-0"),
        "reward-0 was blamed, though nothing was wrong",
    ),
    (
        "orders hold",
        changed(OrderResult, held=False, found="the supervisor went on"),
        "a start: the supervisor went on",
    ),
    ("junk is named", before(Audited, UnreportedJunk("endpoints of x")), "does not name endpoints of x"),
    ("nothing is left", before(Audited, Left("socket /tmp/x", "headrace down")), "after headrace down: socket /tmp/x"),
    ("kills are cheap", before(Audited, Sampled(11, "t.0.0", 10, 17)), "lost 9 tokens of t.0.0; a window has 8"),
]


def test_a_sound_history_has_no_violation() -> None:
    assert check(SOUND, LIMITS) == []


@pytest.mark.parametrize(("invariant", "tamper", "complaint"), TAMPERED, ids=[f"{n}: {c}" for n, _, c in TAMPERED])
def test_a_history_that_breaks_an_invariant_is_caught(
    invariant: str, tamper: Callable[[Sequence[Event]], list[Event]], complaint: str
) -> None:
    found = check(tamper(SOUND), LIMITS)
    assert any(v.invariant == invariant and complaint in v.detail for v in found), found


def test_a_window_that_the_ledger_refused_is_no_loss_of_a_later_kill() -> None:
    longer = before(Audited, Sampled(11, "t.0.0", 10, 17))(SOUND)
    assert [found.invariant for found in check(longer, LIMITS)] == ["kills are cheap"]
    refused = before(Audited, NotStored(G, "t.0.0", 8, 16))(longer)
    assert check(refused, LIMITS) == []
    assert (kill_costs(longer)[0].num_lost, kill_costs(refused)[0].num_lost) == (9, 1)


def test_a_run_stopped_after_all_its_updates_may_be_finished_or_stopped() -> None:
    late = changed(EndOrdered, version=LIMITS.num_updates)(SOUND)
    assert check(late, LIMITS) == [], "it had not finished yet"
    finished = without(lambda e: e == Status("stopping", "stopped by `headrace down`"))
    assert check(finished(late), LIMITS) == []
    early = changed(EndOrdered, version=LIMITS.num_updates - 1)(SOUND)
    assert [v.invariant for v in check(finished(early), LIMITS)] == ["true ends"]


def test_an_order_that_a_start_may_miss_explains_a_stop_and_needs_none() -> None:
    early = before(Audited, EndOrdered(Ending.DOWN_STARTING), SupervisorEnded(130))
    assert check(early(SOUND), LIMITS) == []
    first = [*SOUND[:1], Status("stopping", "stopped by `headrace down`"), *SOUND]
    asked = [EndOrdered(Ending.DOWN_STARTING), SupervisorEnded(0), *first]
    assert check(asked, LIMITS) == []
    assert {v.invariant for v in check(first, LIMITS)} == {"true ends"}


def test_a_worker_whose_epoch_is_junk_has_no_power_until_it_has_a_new_one() -> None:
    junk = before(Claimed, Epoch("generator-0", None))
    assert check(junk(SOUND), LIMITS) == []
    found = check(before(Claimed, Beat(H, 12, 0, 0))(junk(SOUND)), LIMITS)
    assert [v.invariant for v in found] == ["fenced is powerless"]
    again = before(Claimed, Epoch("generator-0", 2))(junk(SOUND))
    assert "went from 2 to 2" in check(again, LIMITS)[0].detail


def test_a_group_goes_on_without_a_member_and_whole_groups_of_dead_letters_do_not() -> None:
    limits = replace(LIMITS, group_size=3)
    name, tries = "t.7.0.0", [NotScored("t.7.0.0", "reward")] * 2
    alone = [*tries, DeadLetter(name, "reward"), Ended("t.7.0", "dropped:dead_letter"), Ended("t.7.1", "trained")]
    assert list(dead_letters_were_tried(alone, limits)) == []
    others = [Ended("t.7.1", "dropped:dead_letter"), Ended("t.7.2", "dropped:dead_letter")]
    assert len(list(dead_letters_were_tried([*alone[:-1], *others], limits))) == 2
    second = [NotScored("t.7.1.0", "reward")] * 2 + [DeadLetter("t.7.1.0", "reward")]
    assert list(dead_letters_were_tried([*alone[:-1], *second, *others], limits)) == []
    of_learner = [DeadLetter(name, "learner"), *others]
    assert list(dead_letters_were_tried(of_learner, limits)) == []


def test_every_invariant_has_a_history_that_breaks_it() -> None:
    assert {name for name, _, _ in TAMPERED} == set(INVARIANTS)


def test_many_violations_of_a_kind_are_counted_not_listed() -> None:
    found = check([*SOUND, *(Stalled(f"wait {n}") for n in range(50))], LIMITS)
    assert [v.detail for v in found][-1] == "... 45 more"


def test_a_kill_costs_what_its_generator_had_sampled_and_not_stored() -> None:
    assert kill_costs(SOUND) == [KillCost("generator-0", 11, num_in_flight=1, num_lost=2, num_sampled_again=2)]
    assert kill_costs(without(lambda e: isinstance(e, Killed))(SOUND)) == []
