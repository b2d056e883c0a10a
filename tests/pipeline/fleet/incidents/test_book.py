"""Suspicions become incidents: one a component, opened, grown and ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.fleet.incidents.book import CALM_S, MAX_GROWN, MAX_OPEN, SAME_S, IncidentBook, Suspicion
from pipeline.fleet.incidents.records import (
    MAX_EVIDENCE,
    MAX_WORDS_CHARS,
    FoundCause,
    IncidentRecord,
    IncidentStep,
)
from tests.pipeline.fleet.incidents.folded import folded


def slow(component: str = "generator-1", kind: str = "slow", since_s: float = 90.0, **more: object) -> Suspicion:
    return Suspicion(component, kind, since_s, f"{component} is {kind}", role="generator", **more)  # type: ignore[arg-type]


def steps(records: list[IncidentRecord]) -> list[tuple[int, str, str]]:
    return [(record.number, str(record.step), record.kind) for record in records]


def test_a_suspicion_opens_one_incident_however_often_it_is_repeated() -> None:
    book = IncidentBook()
    assert steps(book.update(100.0, [slow()])) == [(1, "opened", "slow")]
    for second in range(101, 160):
        assert book.update(float(second), [slow()]) == []
    assert [incident.since_s for incident in book.open] == [90.0]


def test_two_faults_of_one_worker_are_one_incident_with_two_kinds() -> None:
    book = IncidentBook()
    records = book.update(100.0, [slow()]) + book.update(101.0, [slow(kind="silent")])
    assert steps(records) == [(1, "opened", "slow"), (1, "grew", "silent")]
    assert book.open[0].kinds == ("slow", "silent")
    assert book.open[0].sentence == "generator-1 is silent"


def test_another_first_cause_is_news_and_the_same_with_other_confidence_is_none() -> None:
    book = IncidentBook()

    def stalled(who: str, confidence: float) -> Suspicion:
        return slow(causes=(FoundCause(component=who, kind="hung", confidence=confidence),))

    book.update(100.0, [stalled("reward-0", 0.5)])
    assert book.update(101.0, [stalled("reward-0", 0.9)]) == []
    assert steps(book.update(102.0, [stalled("learner", 0.9)])) == [(1, "grew", "slow")]


def test_stacks_are_added_to_an_open_incident_in_bounded_size_and_to_no_other() -> None:
    book = IncidentBook()
    opened = book.update(100.0, [slow(kind="hung")])
    book.update(101.0, [slow(kind="hung")])
    (stood,) = book.add_stacks("generator-1", tuple(f"{number}" * 1000 for number in range(20)))
    assert (stood.number, stood.step, stood.at_s, stood.is_finding) == (1, IncidentStep.STOOD, 101.0, False)
    assert [len(line) for line in stood.evidence] == [MAX_WORDS_CHARS] * MAX_EVIDENCE
    ended = book.update(140.0, [])
    assert book.add_stacks("generator-1", ("late",)) == book.add_stacks("generator-2", ("unknown",)) == []
    (incident,) = folded([*opened, stood, *ended]).values()
    assert (incident.is_open, incident.kinds, incident.stacks) == (False, ("hung",), stood.evidence)
    assert ended[0].at_s >= stood.at_s, "a reader leaves out what seems to be of before"


def test_an_incident_ends_at_its_last_suspicion_once_it_was_calm() -> None:
    book = IncidentBook()
    book.update(100.0, [slow()])
    book.update(110.0, [slow()])
    assert steps(book.update(110.0 + CALM_S - 1.0, [])) == [(1, "quiet", "")]
    ended = book.update(110.0 + CALM_S, [])
    assert [(record.step, record.at_s) for record in ended] == [(IncidentStep.ENDED, 110.0)]
    assert book.open == ()


def test_an_incident_is_quiet_while_it_is_not_found_and_counts_how_long_it_was_found() -> None:
    book, records = IncidentBook(), list[IncidentRecord]()
    for second in range(100, 160):
        is_found = second <= 104 or 110 <= second <= 112 or second == 120
        records += book.update(float(second), [slow()] if is_found else [])
    assert [(str(record.step), record.at_s) for record in records] == [
        ("opened", 100.0), ("quiet", 104.0), ("again", 110.0), ("quiet", 112.0), ("again", 120.0), ("quiet", 120.0),
        ("ended", 120.0),
    ]  # fmt: skip
    told = [folded(records[:number])[1] for number in range(1, len(records) + 1)]
    assert [(one.is_quiet, one.found_s) for one in told] == [
        (False, 0.0), (True, 4.0), (False, 4.0), (True, 6.0), (False, 6.0), (True, 6.0), (False, 6.0),
    ]  # fmt: skip
    assert [str(one.step) for one in told[-2].records] == ["opened", "quiet"], "its pace leaves room for findings"


def test_a_further_finding_or_a_stand_at_a_quiet_moment_keeps_the_time() -> None:
    book = IncidentBook()
    records = [*book.update(100.0, [slow()]), *book.update(103.0, []), *book.add_stacks("generator-1", ("f",))]
    assert folded(records)[1].is_quiet
    records += book.update(105.0, [slow(kind="silent")])
    assert steps(records)[-1] == (1, "grew", "silent")
    grown = folded(records)[1]
    assert (grown.is_quiet, grown.found_from_s, grown.found_s) == (False, 105.0, 0.0)
    reopened = folded([*records, *book.update(140.0, []), *book.update(150.0, [slow()])])[1]
    assert (reopened.is_open, reopened.found_from_s, reopened.found_s) == (True, 150.0, 0.0)


def test_an_incident_that_comes_and_goes_is_not_recorded_for_ever_and_is_found_then() -> None:
    book, records = IncidentBook(), list[IncidentRecord]()
    for second in range(10 * MAX_GROWN):
        records += book.update(float(second), [slow()] if second % 3 == 0 else [])
    assert len(records) <= 2 * MAX_GROWN + 1
    assert not folded(records)[1].is_quiet


def test_a_component_that_is_odd_again_soon_has_the_same_incident_and_later_another() -> None:
    book = IncidentBook()
    records = book.update(100.0, [slow()]) + book.update(140.0, [])
    records += book.update(150.0, [slow()]) + book.update(190.0, [])
    records += book.update(150.0 + SAME_S + 1.0, [])
    records += book.update(400.0, [slow()])
    assert [(number, step) for number, step, _ in steps(records)] == [
        (1, "opened"), (1, "ended"), (1, "opened"), (1, "ended"), (2, "opened"),
    ]  # fmt: skip


def test_a_restarted_writer_goes_on_with_the_open_incidents_and_numbers() -> None:
    first = IncidentBook()
    records = first.update(100.0, [slow(), slow("reward-0")])
    second = IncidentBook(folded(records).values(), now_s=105.0)
    assert second.update(105.0, [slow()]) == []
    assert steps(second.update(106.0, [slow("learner")])) == [(3, "opened", "slow")]
    assert [record.component for record in second.update(105.0 + CALM_S, [slow(), slow("learner")])] == ["reward-0"]


def test_a_writer_that_leaves_ends_what_is_open_and_the_next_opens_it_again() -> None:
    first = IncidentBook()
    records = first.update(100.0, [slow()]) + first.close()
    assert [str(record.step) for record in records] == ["opened", "ended"]
    second = IncidentBook(folded(records).values(), now_s=110.0)
    assert steps(second.update(110.0, [slow()])) == [(1, "opened", "slow")]


def test_a_flood_of_suspicions_is_counted_and_opens_no_more() -> None:
    book = IncidentBook()
    records = book.update(100.0, [slow(f"generator-{number}") for number in range(MAX_OPEN + 5)])
    assert len(records) == len(book.open) == MAX_OPEN
    assert book.num_unlisted == 5


def test_causes_that_alternate_for_ever_write_a_bounded_number_of_records() -> None:
    book = IncidentBook()
    num_records = 0
    for second in range(1000):
        causes = (FoundCause(component=f"reward-{second % 2}", kind="hung"),)
        num_records += len(book.update(100.0 + second, [slow(causes=causes)]))
    assert num_records == 1 + MAX_GROWN


@given(st.lists(st.tuples(st.floats(0.1, 60.0), st.sets(st.sampled_from("abc"))), max_size=30))
def test_every_incident_opens_before_it_ends_and_a_component_has_one_at_a_time(
    moments: list[tuple[float, set[str]]],
) -> None:
    book, records, now_s = IncidentBook(), list[IncidentRecord](), 0.0
    for pause_s, names in moments:
        now_s += pause_s
        records += book.update(now_s, [slow(name, since_s=now_s) for name in sorted(names)])
        assert {incident.component for incident in book.open} >= names
    open_now: dict[str, int] = {}
    for record in records:
        if record.step is IncidentStep.OPENED:
            assert record.component not in open_now
            open_now[record.component] = record.number
        else:
            assert open_now[record.component] == record.number
        if record.step is IncidentStep.ENDED:
            del open_now[record.component]
    assert {one.component for one in book.open} == set(open_now)
    assert {one.component for one in folded(records).values() if one.is_open} == set(open_now)
