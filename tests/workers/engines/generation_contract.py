"""The contract of every generation engine. A test module subclasses :class:`GenerationContract` and
makes the engine.

Engines around a model keep :class:`tests.workers.engines.model_contract.ModelContract` besides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pipeline.weights.store import write_publication
from pipeline.weights.tensorfile import Publication
from protocol.errors import EngineError, WeightsRejected
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Segment
from tests.workers.engines.tiny import VOCABULARY
from workers.engines.generation.seam import GenerationEngine, SampledWindow, SamplingParams, WindowRequest
from workers.engines.model.weights_file import publish_tensors

EMPTY = np.empty(0, np.int32)


def bytes_of(published: Publication) -> np.ndarray:
    """Return a publication's bytes, uint8 [num_bytes]."""
    data = np.empty(published.num_bytes, np.uint8)
    write_publication(data, published)
    return data


LIMIT = 40
STOP = 1


def request(
    number: int = 0,
    *,
    prompt: Iterable[int] | None = None,
    response: np.ndarray = EMPTY,
    window: int = 24,
    limit: int = LIMIT,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    stop_strings: tuple[str, ...] = (),
) -> WindowRequest:
    """Make a request; its prompt depends on its group, four members a group."""
    if prompt is None:
        rng = np.random.default_rng(number // 4)
        prompt = rng.integers(2, VOCABULARY, size=rng.integers(1, 12))
    return WindowRequest(
        trajectory=TrajectoryId("t", number // 4, number % 4),
        prompt_tokens=np.asarray(prompt, np.int32),
        response_tokens=response,
        window_tokens=window,
        max_response_tokens=limit,
        sampling=sampling or SamplingParams(1.0),
        seed=seed,
        stop_strings=stop_strings,
    )


def continued(before: WindowRequest, window: SampledWindow) -> WindowRequest:
    """Make the request for the next window."""
    tokens = np.concatenate([before.response_tokens, window.tokens])
    return replace(before, response_tokens=tokens)


def drain(engine: GenerationEngine, *, steps: int = 8) -> dict[TrajectoryId, SampledWindow]:
    """Advance until nothing is live."""
    windows: dict[TrajectoryId, SampledWindow] = {}
    while engine.stats().num_live:
        for window in engine.advance(steps):
            assert window.trajectory not in windows
            windows[window.trajectory] = window
    return windows


_ALONE: dict[tuple[Any, ...], SampledWindow] = {}


class GenerationContract(ABC):
    """The tests. Engines know 64 tokens, 512 positions, and stop at token 1 unless given other stop
    tokens."""

    @abstractmethod
    def bare(
        self, *, num_slots: int, stop: Iterable[int] = (STOP,), kv_policy: Literal["keep", "recompute"] = "keep"
    ) -> GenerationEngine:
        """Make an engine without weights."""

    @abstractmethod
    def weights(self, version: int) -> Mapping[str, Any]:
        """Return weights that the engine takes; those of different versions may differ."""

    def published(self, version: int) -> np.ndarray:
        """Return the bytes of ``weights(version)`` as a learner publishes them."""
        return bytes_of(publish_tensors(self.weights(version).items(), dtype="float32"))

    def check(self, asked: WindowRequest, window: SampledWindow) -> None:
        """Compare a window with the expected window of version 0."""
        assert window.tokens.size == window.behavior_logprobs.size == sum(s.num_tokens for s in window.segments)

    @pytest.fixture
    def start(self) -> Callable[..., GenerationEngine]:
        """Return a maker of engines that serve version 0."""

        def make(num_slots: int = 6, **options: Any) -> GenerationEngine:
            engine = self.bare(num_slots=num_slots, **options)
            engine.load_weights(self.weights(0), 0)
            return engine

        return make

    def test_a_published_version_is_read_where_it_lies_and_served(self, tmp_path: Path) -> None:
        engine, given = self.bare(num_slots=2), self.weights(1)
        tensors = engine.view_weights(self.published(1), tmp_path / "version")
        assert {name: tuple(t.shape) for name, t in tensors.items()} == {n: tuple(t.shape) for n, t in given.items()}
        engine.load_weights(tensors, 1)
        assert (engine.policy_version, engine.unserved(tensors)) == (1, [])

    def test_bytes_that_are_no_adapter_are_not_merged(self) -> None:
        whole = self.published(0)
        with pytest.raises(WeightsRejected, match="adapter"):
            self.bare(num_slots=2).merge_weights(whole, whole, "00", dtype="float32")

    def test_more_requests_than_slots_are_all_served(self, start) -> None:
        engine = start(num_slots=3)
        requests = [request(n, window=3 + n % 17) for n in range(40)]
        for each in requests:
            engine.submit(each)
        assert engine.stats().num_live == 40
        windows = drain(engine, steps=5)
        assert len(windows) == 40
        for each in requests:
            self.check(each, windows[each.trajectory])
        assert engine.stats().num_sampled_tokens == sum(w.tokens.size for w in windows.values())

    @pytest.mark.parametrize(
        ("wrong", "complaint"),
        [
            (request(prompt=[]), "empty prompt"),
            (request(prompt=[5, VOCABULARY]), "tokenizer and model"),
            (request(prompt=[5] * 500), "positions"),
            (request(response=np.full(LIMIT, 5, np.int32)), "room for one token"),
            (request(window=0), "room for one token"),
        ],
    )
    def test_a_request_that_can_never_be_served_is_refused(self, start, wrong: WindowRequest, complaint: str) -> None:
        engine = start()
        with pytest.raises(EngineError, match=complaint):
            engine.submit(wrong)
        assert engine.stats().num_live == 0

    def test_a_trajectory_is_live_once_and_only_with_weights(self, start) -> None:
        engine = start()
        engine.submit(request())
        with pytest.raises(EngineError, match="live already"):
            engine.submit(request())
        engine.advance(1)
        with pytest.raises(EngineError, match="live already"):
            engine.submit(request())
        bare = self.bare(num_slots=2)
        assert bare.policy_version == -1
        bare.submit(request())
        with pytest.raises(EngineError, match="first weights"):
            bare.advance(1)

    def whole(self, start, numbers: Sequence[int], **options: Any) -> dict[int, SampledWindow]:
        """Sample each trajectory alone, in one window, in an engine of its own, once for all tests of a class."""
        for number in numbers:
            key = type(self), number, *options.items()
            if key not in _ALONE:
                engine = start(num_slots=1)
                engine.submit(request(number, window=LIMIT, **options))
                _ALONE[key] = drain(engine)[request(number).trajectory]
        return {number: _ALONE[type(self), number, *options.items()] for number in numbers}

    @pytest.mark.parametrize(("window", "elsewhere"), [(1, True), (7, False), (7, True), (LIMIT, False)])
    def test_neither_slot_nor_batch_nor_window_split_nor_engine_changes_a_trajectory(
        self, start, window: int, elsewhere: bool
    ) -> None:
        numbers = range(7)
        alone = self.whole(start, numbers)
        engines = [start(num_slots=4), start(num_slots=2)]
        asked = {request(n).trajectory: request(n, window=window) for n in numbers}
        logprobs: dict[TrajectoryId, list[np.ndarray]] = {name: [] for name in asked}
        for each in asked.values():
            engines[0].submit(each)
        done: dict[TrajectoryId, np.ndarray] = {}
        turn = 0
        while len(done) < len(asked):
            turn += 1
            for engine in engines:
                for got in engine.advance(3):
                    name = got.trajectory
                    logprobs[name].append(got.behavior_logprobs)
                    asked[name] = continued(asked[name], got)
                    if got.finish_reason.is_final:
                        done[name] = asked[name].response_tokens
                    else:
                        engines[turn % 2 if elsewhere else engines.index(engine)].submit(asked[name])
        for number in numbers:
            name = request(number).trajectory
            np.testing.assert_array_equal(done[name], alone[number].tokens)
            np.testing.assert_allclose(np.concatenate(logprobs[name]), alone[number].behavior_logprobs, atol=1e-5)

    def test_another_seed_or_member_samples_something_else(self, start) -> None:
        one, two = self.whole(start, [0, 1]).values()
        (other,) = self.whole(start, [0], seed=1).values()
        assert one.tokens.tolist() != two.tokens.tolist()
        assert one.tokens.tolist() != other.tokens.tolist()

    def test_a_returning_trajectory_is_not_prefilled_again_while_its_slot_is_free(self, start) -> None:
        engine = start(num_slots=2, stop=())
        first = request(prompt=range(2, 12), window=5)
        engine.submit(first)
        window = drain(engine)[first.trajectory]
        before = engine.stats().num_prefill_tokens
        assert before == 9
        second = continued(first, window)
        engine.submit(second)
        window = drain(engine)[first.trajectory]
        assert engine.stats().num_prefill_tokens == before
        # both slots are wanted
        for other in (request(8, prompt=[3], window=2), request(9, prompt=[3], window=2)):
            engine.submit(other)
        drain(engine)
        third = continued(second, window)
        engine.submit(third)
        drain(engine)
        assert engine.stats().num_prefill_tokens == before + third.prompt_tokens.size + third.response_tokens.size - 1

    def test_cut_and_resume_equals_uninterrupted(self, start) -> None:
        alone = self.whole(start, range(8))
        engine = start(num_slots=5)
        for number in range(8):
            engine.submit(request(number, window=LIMIT))
        done = {w.trajectory: w for w in engine.advance(4)}
        cut = engine.cut()
        assert engine.stats().num_live == 0
        assert engine.cut() == []
        assert {w.finish_reason for w in cut} <= {FinishReason.WINDOW}
        assert all(w.tokens.size > 0 for w in cut)
        assert cut
        resumed = start(num_slots=8)
        partial = {w.trajectory: w for w in cut}
        for number in range(8):
            name = request(number).trajectory
            if name in partial:
                resumed.submit(continued(request(number, window=LIMIT), partial[name]))
            elif name not in done:
                resumed.submit(request(number, window=LIMIT))
        rest = drain(resumed)
        for number in range(8):
            name = request(number).trajectory
            parts = [part[name].tokens for part in (done, partial, rest) if name in part]
            np.testing.assert_array_equal(np.concatenate(parts), alone[number].tokens)

    def test_a_forgotten_trajectory_returns_no_window_and_leaves_the_others_as_they_were(self, start) -> None:
        alone = self.whole(start, range(6))
        engine = start(num_slots=4)
        for number in range(6):
            engine.submit(request(number, window=LIMIT))
        got = {w.trajectory: w for w in engine.advance(2)}
        # live, waiting, unknown
        for number in (0, 5, 7):
            engine.forget(request(number).trajectory)
        got |= drain(engine)
        assert set(got) == {request(number).trajectory for number in (1, 2, 3, 4)}
        for number in (1, 2, 3, 4):
            np.testing.assert_array_equal(got[request(number).trajectory].tokens, alone[number].tokens)

    def test_staged_weights_change_nothing_before_they_are_loaded(self, start) -> None:
        engine = start()
        asked = request()
        engine.submit(asked)
        windows = {window.trajectory: window for window in engine.advance(2)}
        engine.stage_weights(self.weights(1), 1)
        windows |= drain(engine)
        assert engine.policy_version == 0
        assert [segment.policy_version for segment in windows[asked.trajectory].segments] == [0]
        self.check(asked, windows[asked.trajectory])

    def test_two_swaps_without_a_token_between_them_leave_no_empty_segment(self, start) -> None:
        engine = start(stop=())
        engine.submit(request(window=8))
        engine.load_weights(self.weights(1), 1)
        engine.advance(3)
        engine.load_weights(self.weights(2), 2)
        engine.load_weights(self.weights(3), 3)
        window = drain(engine)[request().trajectory]
        assert window.segments == (Segment(1, 3), Segment(3, 5))
