"""Claims about the words for a trajectory's life."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.ledger.life import ChunkLife, LeaseEvent, ScoreEvent, TrajectoryLife, UnitEnd, life_events, life_from
from protocol.trajectory import Field

SCORE = ScoreEvent(Field.REWARD, "reward-0#1", 5.0, accuracy=0.5, reward=-0.25)
CHUNK = ChunkLife(
    index=0,
    num_tokens=1234,
    written_s=3.0,
    worker="generator-1#2",
    versions=(4, 5, 7),
    scores=(SCORE, ScoreEvent(Field.VALUE, "value#1", 4.0, None, None)),
    ready_s=6.0,
    claimed_s=7.0,
    end=UnitEnd(8.0, "stale", 9, 5),
)
LIFE = TrajectoryLife(
    name="t.0.0",
    state="trained",
    admitted_s=1.0,
    prompt=0,
    num_tokens=1234,
    ready_s=None,
    claimed_s=None,
    num_leases=1,
    leases=(LeaseEvent("generator-1#2", 2.0),),
    num_chunks=1,
    chunks=(CHUNK,),
    end=UnitEnd(9.0, "", 9, 1),
)


def test_events_are_told_in_the_order_of_time_with_all_that_is_known() -> None:
    assert life_events(LIFE) == [
        (1.0, "admitted"),
        (2.0, "leased by generator-1#2"),
        (3.0, "chunk 0: 1,234 tokens of version 4 to 7, by generator-1#2"),
        (4.0, "chunk 0: value, by value#1"),
        (5.0, "chunk 0: reward -0.25, accuracy 0.5, by reward-0#1"),
        (6.0, "chunk 0 ready"),
        (7.0, "chunk 0 claimed by the learner"),
        (8.0, "chunk 0 dropped: stale, 5 versions behind"),
        (9.0, "trained on by update 10, 1 version behind"),
    ]


def test_what_is_not_known_is_left_out() -> None:
    bare = replace(CHUNK, worker="", versions=(), scores=(), ready_s=None, claimed_s=None, end=None)
    life = replace(LIFE, admitted_s=None, leases=(), chunks=(bare,), end=UnitEnd(9.0, "", 0, None))
    assert [words for _, words in life_events(life)] == ["chunk 0: 1,234 tokens", "trained on by update 1"]
    assert life_events(replace(life, chunks=(replace(bare, written_s=None),), end=None)) == []


@pytest.mark.parametrize("at_s", [0.0, 7.5])
def test_events_of_one_time_stand_in_the_order_in_which_they_follow_one_another(at_s: float) -> None:
    chunk = replace(CHUNK, written_s=at_s, scores=(), ready_s=at_s, claimed_s=at_s, end=None)
    life = replace(
        LIFE, admitted_s=at_s, leases=(LeaseEvent("g#1", at_s),), chunks=(chunk,), end=UnitEnd(at_s, "", 0, 0)
    )
    assert [words.split()[0] for _, words in life_events(life)] == ["admitted", "leased", *["chunk"] * 3, "trained"]


def test_a_life_is_read_whatever_a_client_calls_itself() -> None:
    odd = "generator-<b>5 6</b> x#1"
    scored = [f"{odd} 3.0 1 0.5", f"{odd} 4.0  ", ""]
    row = ["0", "7", "2.5", f"{odd} 3 4", *scored, "", "", ""]
    places = ["t.0.1", "claimed", "1.0", "0", "7", "5.0", "6.0", "1", "1", "", f"{odd} 2.0"]
    life = life_from("\n".join(map("\t".join, (places, row))))
    [lease], [chunk] = life.leases, life.chunks
    assert (lease.who, lease.at_s) == (odd, 2.0)
    assert (chunk.worker, chunk.versions) == (odd, (3, 4))
    assert [(score.who, score.at_s, score.accuracy, score.reward) for score in chunk.scores] == [
        (odd, 3.0, 1.0, 0.5),
        (odd, 4.0, None, None),
    ]
