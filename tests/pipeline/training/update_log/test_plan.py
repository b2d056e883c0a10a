"""Claims about the updates that a replay runs, and its start."""

from __future__ import annotations

from pathlib import Path

from pipeline.training.update_log.folder import LogWriter, read_log
from pipeline.training.update_log.plan import Checkpoints, Plan, Source, make_plan, update_spans, version_of
from pipeline.training.update_log.records import Origin
from tests.pipeline.training.update_log.logs import append_update, start


def segment(
    folder: Path,
    epoch: int,
    first: int,
    last: int,
    *,
    version: int | None = None,
    origin: Origin = Origin.CONTINUED,
    state: str | None = None,
    state_version: int | None = None,
    unfinished: bool = False,
) -> None:
    """Updates ``first`` to ``last``, of which the first starts from ``version``."""
    at = first - 1 if version is None else version
    writer = LogWriter(folder, epoch=epoch)
    name = f"cp-{state_version or at}" if origin is Origin.CHECKPOINT else None
    begin = start(
        state or f"v{at}",
        num_updates=first - 1,
        version=at,
        state_version=state_version,
        origin=origin,
        checkpoint=name,
    )
    writer.begin(begin)
    for offset, update in enumerate(range(first, last + 1), start=1):
        is_lost = unfinished and update == last
        append_update(writer, update, version=at + offset, state=None if is_lost else "")
    writer.seal()


def plan(
    folder: Path, at_hand: Checkpoints | None = None, *, after: int | None = None, until: int | None = None
) -> Plan:
    return make_plan(update_spans(read_log(folder)), at_hand or {}, after=after, until=until)


def told(made: Plan) -> list[tuple[Source, str | None, list[int], list[int]]]:
    """For each leg: where from, which checkpoint, the versions it makes, the positions that it
    keeps."""
    return [
        (
            leg.source,
            leg.checkpoint,
            [version_of(update) for update in leg.span.updates[leg.begin : leg.end]],
            sorted(leg.kept),
        )
        for leg in made.legs
    ]


def lost(made: Plan) -> list[int]:
    return [version_of(update) for update in made.unreachable]


def test_segments_of_one_learner_are_one_leg_from_the_start_model(tmp_path: Path) -> None:
    segment(tmp_path, 1, 1, 2, origin=Origin.START_MODEL)
    segment(tmp_path, 1, 3, 5)
    made = plan(tmp_path, {(2, 2): "cp-2"})
    assert told(made) == [(Source.START_MODEL, None, [1, 2, 3, 4, 5], [])]
    assert lost(made) == []


def test_a_range_begins_at_the_newest_checkpoint_before_it(tmp_path: Path) -> None:
    segment(tmp_path, 1, 1, 6, origin=Origin.START_MODEL)
    at_hand = {(2, 2): "cp-2", (4, 4): "cp-4"}
    assert told(plan(tmp_path, at_hand, after=4)) == [(Source.CHECKPOINT, "cp-4", [5, 6], [])]
    assert told(plan(tmp_path, at_hand, after=3, until=5)) == [(Source.CHECKPOINT, "cp-2", [3, 4, 5], [])]
    assert told(plan(tmp_path, at_hand, after=1, until=1)) == []
    assert told(plan(tmp_path, at_hand, after=0, until=1)) == [(Source.START_MODEL, None, [1], [])]
    assert told(plan(tmp_path, at_hand, until=2)) == [(Source.START_MODEL, None, [1, 2], [])]


def died_after_its_checkpoint(folder: Path) -> None:
    """A learner makes 5 updates with a checkpoint after the third; its successor publishes that as
    version 6."""
    segment(folder, 1, 1, 3, origin=Origin.START_MODEL)
    segment(folder, 1, 4, 5)
    segment(folder, 2, 4, 6, version=6, state="v3", state_version=3, origin=Origin.CHECKPOINT)


def test_a_restart_is_another_branch_from_a_state_that_is_kept_on_the_way(tmp_path: Path) -> None:
    died_after_its_checkpoint(tmp_path)
    assert told(plan(tmp_path)) == [
        (Source.START_MODEL, None, [1, 2, 3, 4, 5], [3]),
        (Source.REPLAYED, None, [7, 8, 9], []),
    ]


def test_a_range_in_the_second_branch_needs_of_the_first_only_what_leads_to_it(tmp_path: Path) -> None:
    died_after_its_checkpoint(tmp_path)
    assert told(plan(tmp_path, after=6)) == [
        (Source.START_MODEL, None, [1, 2, 3], [3]),
        (Source.REPLAYED, None, [7, 8, 9], []),
    ]
    assert told(plan(tmp_path, {(3, 3): "cp-3"}, after=7, until=8)) == [(Source.CHECKPOINT, "cp-3", [7, 8], [])]
    at_hand = {(3, 3): "cp-3", (8, 5): "cp-8"}
    assert told(plan(tmp_path, at_hand, after=8)) == [(Source.CHECKPOINT, "cp-8", [9], [])]


def test_learners_that_died_before_a_checkpoint_all_began_at_the_start_model(tmp_path: Path) -> None:
    segment(tmp_path, 1, 1, 2, origin=Origin.START_MODEL)
    segment(tmp_path, 2, 1, 2, version=3, state="v0", state_version=0, origin=Origin.START_MODEL)
    assert [leg[:3] for leg in told(plan(tmp_path))] == [
        (Source.START_MODEL, None, [1, 2]),
        (Source.START_MODEL, None, [4, 5]),
    ]


def test_a_third_branch_rests_on_the_second_which_rests_on_the_first(tmp_path: Path) -> None:
    died_after_its_checkpoint(tmp_path)
    segment(tmp_path, 3, 6, 7, version=10, state="v8", state_version=8, origin=Origin.CHECKPOINT)
    made = plan(tmp_path, after=10)
    assert told(made) == [
        (Source.START_MODEL, None, [1, 2, 3], [3]),
        (Source.REPLAYED, None, [7, 8], [2]),
        (Source.REPLAYED, None, [11, 12], []),
    ]


def test_a_log_whose_beginning_was_removed_begins_at_its_oldest_checkpoint(tmp_path: Path) -> None:
    segment(tmp_path, 1, 4, 5)
    segment(tmp_path, 1, 6, 9)
    at_hand = {(5, 5): "cp-5", (7, 7): "cp-7"}
    made = plan(tmp_path, at_hand)
    assert told(made) == [(Source.CHECKPOINT, "cp-5", [6, 7, 8, 9], [])]
    assert lost(made) == [4, 5]
    made = plan(tmp_path)
    assert (told(made), lost(made)) == ([], [4, 5, 6, 7, 8, 9])


def test_what_a_full_disk_swallowed_is_bridged_by_a_checkpoint_only(tmp_path: Path) -> None:
    segment(tmp_path, 1, 1, 2, origin=Origin.START_MODEL)
    segment(tmp_path, 1, 5, 6, origin=Origin.AFTER_FAILURE)
    made = plan(tmp_path)
    assert (told(made), lost(made)) == ([(Source.START_MODEL, None, [1, 2], [])], [5, 6])
    assert told(plan(tmp_path, {(4, 4): "cp-4"})) == [
        (Source.START_MODEL, None, [1, 2], []),
        (Source.CHECKPOINT, "cp-4", [5, 6], []),
    ]


def test_a_segment_that_is_gone_from_the_middle_is_not_stepped_over(tmp_path: Path) -> None:
    for first in (1, 3, 5):
        segment(tmp_path, 1, first, first + 1, origin=Origin.START_MODEL if first == 1 else Origin.CONTINUED)
    (tmp_path / "000002.epoch-1.log").unlink()
    made = plan(tmp_path)
    assert (told(made), lost(made)) == ([(Source.START_MODEL, None, [1, 2], [])], [5, 6])


def test_an_update_that_was_never_made_is_the_last_of_its_branch(tmp_path: Path) -> None:
    segment(tmp_path, 1, 1, 3, origin=Origin.START_MODEL, unfinished=True)
    segment(tmp_path, 2, 3, 3, version=4, state="v2", state_version=2, origin=Origin.CHECKPOINT)
    assert told(plan(tmp_path)) == [
        (Source.START_MODEL, None, [1, 2, 3], [2]),
        (Source.REPLAYED, None, [5], []),
    ]
