"""Claims about the responses that are kept for people: few, short, private, spread over the run,
and real."""

from __future__ import annotations

import json
import stat
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.vapo import Vapo
from pipeline.config.runtime import SamplesSection
from pipeline.ledger.types import ClaimedUnit, ScoredChunk, ShownResponse
from pipeline.observability.samples import SAMPLES_NAME, Samples, kept_updates, response_samples, spread
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field, FinishReason, Prompt, RewardScore, Segment, TrajectoryChunk, Turn
from tests.pipeline.algorithms.conversations import converse, trajectory_units
from tests.rules import make_rule


def _response(group: int, member: int, reward: float, text: str = "", prompt: str = "2+2=") -> tuple[ScoredChunk, ...]:
    """Two windows, sampled by versions 3 and 4; the second one ends and is scored."""
    name = TrajectoryId("t", group, member)
    made: list[ScoredChunk] = []
    for index in range(2):
        chunk = TrajectoryChunk(
            id=ChunkId(name, index),
            prompt=Prompt(
                prompt_id="p", tokens=np.array([1], np.int32), text=prompt, answer="4", verifier="arithmetic"
            ),
            context_tokens=np.zeros(3 * index, np.int32),
            tokens=np.zeros(3, np.int32),
            behavior_logprobs=np.zeros(3, np.float32),
            segments=(Segment(3 + index, 3),),
            finish_reason=FinishReason.STOP if index else FinishReason.WINDOW,
            response_text=(text or f"response {group}.{member}") if index else None,
        )
        score = RewardScore(reward=reward, accuracy=float(reward > 0), parts={"correct": reward, "overlong": 0.0})
        made.append(ScoredChunk(chunk, {Field.REWARD: score} if index else {}))
    return tuple(made)


def _group(number: int, *rewards: float) -> ClaimedUnit:
    return ClaimedUnit(str(number), tuple(_response(number, m, reward) for m, reward in enumerate(rewards)))


def _kept(folder: Path, **settings: int) -> Samples:
    return Samples(SamplesSection(**settings), folder, 0)


def _read(folder: Path) -> list[int]:
    return [sample.update for sample in response_samples(folder).read()[0]]


def test_the_worst_and_the_best_of_one_group_are_kept_with_prompt_reward_and_verdict(tmp_path: Path) -> None:
    _kept(tmp_path).keep([_group(7, 0.5, -1.0, 1.0, 0.0)], 1, 1)
    worst, best = response_samples(tmp_path).read()[0]
    assert (worst.reward, worst.verdict, worst.response) == (-1.0, "wrong", "response 7.1")
    assert (best.reward, best.verdict, best.response) == (1.0, "right", "response 7.2")
    assert (best.prompt, best.answer, best.trajectory) == ("2+2=", "4", "t.7.2")
    assert best.parts == {"correct": 1.0, "overlong": 0.0}
    assert best.facts == (
        "reward +1.00 (correct +1.00, overlong +0.00), 6 tokens, ended by itself, sampled by version 3 to 4"
    )


def test_the_group_is_another_from_update_to_update(tmp_path: Path) -> None:
    samples = _kept(tmp_path)
    for update in range(1, 9):
        samples.keep([_group(number, 1.0, -1.0) for number in range(8)], update, update)
    assert len({sample.trajectory.split(".")[1] for sample in response_samples(tmp_path).read()[0]}) > 4


def test_units_of_one_response_are_kept_and_unfinished_windows_are_not(tmp_path: Path) -> None:
    alone = [ClaimedUnit(f"t.{n}.0", (_response(n, 0, float(n)),)) for n in range(4)]
    window = ClaimedUnit("t.9.0.0", (_response(9, 0, 1.0)[:1],))
    _kept(tmp_path, per_update=3).keep([window, *alone, window], 1, 1)
    kept = list(response_samples(tmp_path).read()[0])
    assert len(kept) == 3
    assert all(sample.response for sample in kept)


def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    _kept(tmp_path, per_update=0).keep([_group(1, 1.0)], 1, 1)
    assert not (tmp_path / SAMPLES_NAME).exists()


def test_the_number_is_bounded_and_spread_over_the_whole_run_with_the_newest(tmp_path: Path) -> None:
    samples = _kept(tmp_path, keep_updates=8)
    for update in range(1, 401):
        samples.keep([_group(1, 1.0)], update, update)
        assert len(set(_read(tmp_path))) < 16
    kept = _read(tmp_path)
    assert kept == sorted(kept)
    assert kept[0] == 1
    assert kept[-4:] == [397, 398, 399, 400]
    older = [update for update in kept if update < 380]
    assert max(b - a for a, b in pairwise(older)) <= 128, "no long stretch is without a sample"


@pytest.mark.parametrize("number", [1, 2, 7, 50])
@pytest.mark.parametrize("last", [3, 100, 4097])
def test_what_is_left_out_once_is_never_wanted_later(number: int, last: int) -> None:
    now, later = kept_updates(range(1, last + 1), number), kept_updates(range(1, 3 * last), number)
    assert {update for update in later if update <= last} <= now
    assert len(now) <= 2 * number + 1


def test_a_long_response_loses_its_middle_and_keeps_its_answer(tmp_path: Path) -> None:
    text = "begin " + "x" * 10_000 + " The answer is 4."
    unit = ClaimedUnit("1", (_response(1, 0, 1.0, text, prompt="p" * 5_000),))
    _kept(tmp_path, max_chars=300).keep([unit], 1, 1)
    (sample,) = response_samples(tmp_path).read()[0]
    assert sample.response.startswith("begin x")
    assert sample.response.endswith(" The answer is 4.")
    assert "[... 9,723 characters ...]" in sample.response
    assert len(sample.response) < 340
    assert len(sample.prompt) < 340


def test_the_file_is_its_owners_alone_and_plain_ascii(tmp_path: Path) -> None:
    samples, path = _kept(tmp_path, keep_updates=1), tmp_path / SAMPLES_NAME
    # appended to, and written anew
    for update in range(1, 4):
        samples.keep([ClaimedUnit("1", (_response(1, 0, 1.0, "\x1b[2J\x9b31m 四"),))], update, update)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_bytes().isascii()
        assert b"\x1b" not in path.read_bytes()
    assert response_samples(tmp_path).read()[0][-1].response == "\x1b[2J\x9b31m 四"


def test_a_learner_that_resumes_drops_what_came_after_its_checkpoint_and_goes_on(tmp_path: Path) -> None:
    samples = _kept(tmp_path)
    for update in range(1, 6):
        samples.keep([_group(1, 1.0)], update, update)
    again = Samples(SamplesSection(), tmp_path, 3)
    assert _read(tmp_path) == [1, 2, 3]
    again.keep([_group(1, 1.0)], 4, 6)
    assert _read(tmp_path) == [1, 2, 3, 4]


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path) -> None:
    samples = Samples(SamplesSection(), tmp_path / "gone", 0)
    samples.keep([_group(1, 1.0)], 1, 1)
    (tmp_path / "gone").mkdir()
    samples.keep([_group(1, 1.0)], 2, 2)
    assert _read(tmp_path / "gone") == [2]


def test_a_few_updates_are_shown_of_many_the_first_and_the_last_among_them(tmp_path: Path) -> None:
    samples = _kept(tmp_path)
    samples.keep([_group(1, 1.0, 0.0)], 1, 1)
    one = response_samples(tmp_path).read()[0][0]
    many = [replace(one, update=update) for update in range(1, 41) for _ in range(2)]
    assert [sample.update for sample in spread(many, 4)] == [1, 1, 14, 14, 27, 27, 40, 40]
    assert spread(many[:4], 4) == many[:4]


def _trained(name: str, *advantages: float) -> TrainingSample:
    size = len(advantages)
    return TrainingSample(
        name=name,
        tokens=np.zeros(1 + size, np.int32),
        prompt_length=1,
        loss_mask=np.ones(size, bool),
        advantages=np.array(advantages, np.float32),
        behavior_logprobs=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
    )


def test_tokens_are_kept_with_version_log_prob_and_advantage(tmp_path: Path) -> None:
    trained = [_trained("t.7.0", -1.0, -1.0, -1.0, -1.0, -1.0, -1.0), _trained("t.7.1", 0.0, 0.1, 0.2, 0.3, 0.4, 0.5)]
    _kept(tmp_path).keep([_group(7, -1.0, 1.0)], 1, 1, trained)
    worst, best = response_samples(tmp_path).read()[0]
    assert worst.tokens is not None
    assert best.tokens is not None
    assert worst.tokens.ids == (0,) * 6
    assert worst.tokens.logprobs == (0.0,) * 6
    assert worst.tokens.segments == best.tokens.segments == ((3, 3), (4, 3))
    # One number stands for equal ones.
    assert worst.tokens.advantages == (-1.0,)
    assert best.tokens.advantages == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    assert best.tokens.cuts == ()


def test_a_conversation_has_the_environments_words_between_the_models(tmp_path: Path) -> None:
    one = converse(np.random.default_rng(5), 7, 0, RewardScore(reward=1.0, accuracy=1.0), num_turns=3, replaces=0.5)
    cut = one.chunks[-1].scores[Field.TURN]
    assert isinstance(cut, Turn) and len({len(window) for window in one.windows}) > 1, "windows differ in length"
    one.chunks[-1].scores[Field.TURN] = replace(cut, is_truncated=True)
    trained = make_rule(Vapo, whiten=False).prepare(trajectory_units([one]))
    _kept(tmp_path).keep(trajectory_units([one]), 1, 1, trained)
    (sample,) = response_samples(tmp_path).read()[0]
    assert sample.prompt == "Q: " and "cut at the limit" in sample.facts
    assert sample.response == "said 0. told 0. said 1. told 1. said 2. "
    assert sample.num_tokens == len(one.tokens) and sample.versions[0] > 3, "the opening has sampled nothing"
    assert sample.tokens is not None
    assert sample.tokens.ids == tuple(token.token for token in one.tokens)
    assert len(sample.tokens.advantages) == len(one.tokens) and sample.tokens.cuts == ()
    ends = np.cumsum([len(window) for window in one.windows])
    at = [end for end, s in zip(ends, one.body, strict=True) if s.chunk.finish_reason is FinishReason.TURN]
    assert sample.tokens.turns == ((at[0], "told 0. "), (at[1], "told 1. "))


def test_of_a_long_conversation_a_turn_is_kept_where_the_tokens_around_it_are(tmp_path: Path) -> None:
    one = converse(np.random.default_rng(5), 7, 0, RewardScore(reward=1.0, accuracy=1.0), num_turns=5)
    _kept(tmp_path, max_chars=60).keep(trajectory_units([one]), 1, 1)
    (sample,) = response_samples(tmp_path).read()[0]
    assert sample.tokens is not None and len(sample.tokens.ids) == 15
    ((head, num_left_out),) = sample.tokens.cuts
    assert (head, num_left_out) == (5, len(one.tokens) - 15)
    ends = np.cumsum([len(window) for window in one.windows])
    at = [int(end) for end, s in zip(ends, one.body, strict=True) if s.chunk.finish_reason is FinishReason.TURN][:-1]
    kept = [end if end < head else end - num_left_out for end in at if end < head or end >= head + num_left_out]
    assert 0 < len(kept) < len(at)
    assert [place for place, _ in sample.tokens.turns] == kept


def test_of_a_long_response_the_middle_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    _kept(tmp_path, max_chars=16).keep([_group(7, 1.0)], 1, 1, [_trained("t.7.0", 0.0, 0.1, 0.2, 0.3, 0.4, 0.5)])
    (sample,) = response_samples(tmp_path).read()[0]
    assert sample.tokens is not None
    assert sample.tokens.advantages == (0.0, 0.3, 0.4, 0.5)
    assert sample.tokens.segments == ((3, 1), (4, 3))
    assert sample.tokens.cuts == ((1, 2),)


def test_of_windows_that_are_units_the_last_ones_tokens_are_kept(tmp_path: Path) -> None:
    window = ClaimedUnit("t.7.0.1", (_response(7, 0, 1.0)[1:],))
    _kept(tmp_path).keep([window], 1, 1, [_trained("t.7.0.1", 1.0, 2.0, 3.0)])
    (sample,) = response_samples(tmp_path).read()[0]
    assert sample.tokens is not None
    assert (sample.tokens.segments, sample.tokens.advantages) == (((4, 3),), (1.0, 2.0, 3.0))
    assert sample.tokens.cuts == ((0, 3),)


def test_samples_of_earlier_versions_have_no_tokens_and_are_read(tmp_path: Path) -> None:
    _kept(tmp_path).keep([_group(7, 1.0)], 1, 1)
    path = tmp_path / SAMPLES_NAME
    values = json.loads(path.read_text())
    assert values["tokens"]["advantages"] == []
    del values["tokens"]
    path.write_text(json.dumps(values) + "\n" + json.dumps(values | {"tokens": {"ids": "x"}}) + "\n")
    assert [sample.tokens for sample in response_samples(tmp_path).read()[0]] == [None]


def test_responses_that_none_trains_on_are_kept_with_why_beside_those_of_the_update(tmp_path: Path) -> None:
    def shown(kind: str, number: int) -> ShownResponse:
        last = _response(number, 0, -1.0, f"{kind} {number}")[-1]
        score = last.scores[Field.REWARD]
        assert isinstance(score, RewardScore)
        return ShownResponse(kind, last.chunk, score)

    others = [shown("evaluation", 1), *(shown("no_signal", n) for n in range(5))]
    kept = _kept(tmp_path, per_update=2)
    kept.keep([_group(7, 0.5, -1.0)], 1, 1, (), others)
    found = [(sample.kind, sample.response) for sample in response_samples(tmp_path).read()[0]]
    assert found[:3] == [("evaluation", "evaluation 1"), ("no_signal", "no_signal 0"), ("no_signal", "no_signal 1")]
    assert [kind for kind, _ in found[3:]] == ["trained", "trained"]
    of_evaluation, dropped, _, trained, _ = response_samples(tmp_path).read()[0]
    assert "of an evaluation" in of_evaluation.facts and "dropped: no_signal" in dropped.facts
    assert "evaluation" not in trained.facts and "dropped" not in trained.facts
    assert kept._updates == [1], "one update, whatever is kept of it"
