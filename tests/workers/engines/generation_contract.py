"""What every generation engine must do. A test module subclasses :class:`GenerationContract` and says how one is made.

The truth is a plain forward of transformers' own attention over one sequence at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from protocol.errors import EngineError, WeightsRejected
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Segment
from tests.workers.engines.tiny import VOCABULARY, plain_logprobs, tiny_model
from workers.engines.generation import GenerationEngine, SamplingParams, Window, WindowRequest

EMPTY = np.empty(0, np.int32)
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
    )


def continued(before: WindowRequest, window: Window) -> WindowRequest:
    """Make the request for the next window."""
    tokens = np.concatenate([before.response_tokens, window.tokens])
    return replace(before, response_tokens=tokens)


def drain(engine: GenerationEngine, *, steps: int = 8) -> dict[TrajectoryId, Window]:
    """Advance until nothing is live."""
    windows: dict[TrajectoryId, Window] = {}
    while engine.stats().num_live:
        for window in engine.advance(steps):
            assert window.trajectory not in windows
            windows[window.trajectory] = window
    return windows


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's weights as they are published: tied ones once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def check_logprobs(model: PreTrainedModel, asked: WindowRequest, window: Window, *, atol: float = 1e-4) -> None:
    """Compare behaviour log-probs with a plain forward, at the request's temperature (1 for greedy)."""
    sequence = np.concatenate([asked.prompt_tokens, asked.response_tokens, window.tokens])
    with torch.no_grad():
        truth = plain_logprobs(model, sequence, window.tokens.size, asked.sampling.temperature or 1.0)
    np.testing.assert_allclose(window.behavior_logprobs, truth.numpy(), atol=atol)


class GenerationContract(ABC):
    """The tests. ``old`` and ``new`` are two policies of one architecture."""

    @abstractmethod
    def make_engine(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        stop: Iterable[int] = (STOP,),
        kv_policy: Literal["keep", "recompute"] = "keep",
    ) -> GenerationEngine:
        """Make an engine of the model's architecture, without weights."""

    @pytest.fixture
    def old(self) -> PreTrainedModel:
        return tiny_model(seed=1).eval()

    @pytest.fixture
    def new(self) -> PreTrainedModel:
        return tiny_model(seed=2).eval()

    @pytest.fixture
    def start(self, old: PreTrainedModel) -> Callable[..., GenerationEngine]:
        """Return a maker of engines that serve ``old`` as version 0."""

        def make(num_slots: int = 6, **options: Any) -> GenerationEngine:
            engine = self.make_engine(tiny_model(seed=99), num_slots=num_slots, **options)
            engine.load_weights(published(old), 0)
            return engine

        return make

    # -- the distribution ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
    def test_behaviour_logprobs_equal_a_plain_forward(self, start, old, temperature: float) -> None:
        requests = [request(n, sampling=SamplingParams(temperature)) for n in range(19)]
        engine = start()
        for each in requests:
            engine.submit(each)
        windows = drain(engine)
        assert set(windows) == {each.trajectory for each in requests}
        for each in requests:
            check_logprobs(old, each, windows[each.trajectory])

    @pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
    def test_every_architecture_is_served_tied_or_not(self, architecture: str) -> None:
        for tied in (True, False):
            policy = tiny_model(architecture, seed=5, tie_word_embeddings=tied).eval()
            engine = self.make_engine(tiny_model(architecture, tie_word_embeddings=tied), num_slots=4)
            engine.load_weights(published(policy), 3)
            requests = [request(n) for n in range(6)]
            for each in requests:
                engine.submit(each)
            windows = drain(engine)
            for each in requests:
                check_logprobs(policy, each, windows[each.trajectory])

    def test_a_sliding_window_is_respected_in_prefill_and_decode(self) -> None:
        changes = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
        policy = tiny_model("qwen2", seed=6, **changes).eval()
        engine = self.make_engine(tiny_model("qwen2", **changes), num_slots=4)
        engine.load_weights(published(policy), 0)
        requests = [request(n, window=30) for n in range(6)]
        for each in requests:
            engine.submit(each)
        windows = drain(engine)
        for each in requests:
            check_logprobs(policy, each, windows[each.trajectory])

    def test_greedy_equals_the_generate_of_transformers(self, start, old) -> None:
        engine = start(stop=())
        prompts = [np.random.default_rng(n).integers(2, VOCABULARY, size=3 + n) for n in range(8)]
        for number, prompt in enumerate(prompts):
            engine.submit(request(number, prompt=prompt, window=20, sampling=SamplingParams(0.0)))
        windows = drain(engine)
        for number, prompt in enumerate(prompts):
            row = torch.from_numpy(prompt)[None]
            truth = old.generate(
                row, attention_mask=torch.ones_like(row), max_new_tokens=20, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            window = windows[request(number).trajectory]
            np.testing.assert_array_equal(window.tokens, truth[0, prompt.size :].numpy())
            check_logprobs(old, request(number, prompt=prompt, sampling=SamplingParams(0.0)), window)

    def test_top_k_and_top_p_restrict_the_support_and_mixed_requests_share_a_batch(self, start, old) -> None:
        kinds = [SamplingParams(1.0, top_k=3), SamplingParams(1.0, top_p=0.4), SamplingParams(0.8), SamplingParams(0.0)]
        requests = [request(n, sampling=kinds[n % 4]) for n in range(16)]
        engine = start(num_slots=16)
        for each in requests:
            engine.submit(each)
        windows = drain(engine)
        for each in requests:
            window = windows[each.trajectory]
            if each.sampling.top_k == 0 and each.sampling.top_p == 1.0:
                check_logprobs(old, each, window)
                continue
            sequence = np.concatenate([each.prompt_tokens, window.tokens]).astype(np.int64)
            with torch.no_grad():
                logits = old(torch.from_numpy(sequence)[None]).logits[0, each.prompt_tokens.size - 1 : -1].double()
            probabilities = torch.softmax(logits, -1).numpy()
            for row, token, logprob in zip(probabilities, window.tokens, window.behavior_logprobs, strict=True):
                order = np.argsort(-row)
                reached = int(np.searchsorted(np.cumsum(row[order]), each.sampling.top_p)) + 1
                support = order[: each.sampling.top_k or reached]
                assert token in support
                assert abs(np.log(row[token] / row[support].sum()) - logprob) < 1e-4

    # -- endings -------------------------------------------------------------------------------------------------------

    def test_more_requests_than_slots_are_all_served(self, start, old) -> None:
        engine = start(num_slots=3)
        requests = [request(n, window=3 + n % 17) for n in range(40)]
        for each in requests:
            engine.submit(each)
        assert engine.stats().num_live == 40
        windows = drain(engine, steps=5)
        assert len(windows) == 40
        for each in requests:
            check_logprobs(old, each, windows[each.trajectory])
        assert engine.stats().num_sampled_tokens == sum(w.tokens.size for w in windows.values())

    def test_a_window_ends_by_stop_by_window_or_by_length_and_exactly_there(self, start) -> None:
        free = start(num_slots=1, stop=())
        free.submit(request(window=30))
        tokens = drain(free)[request().trajectory].tokens
        at = next(n for n in range(4, 30) if tokens[n] not in tokens[:n])  # first seen at position `at`
        cases = [
            # window, limit, expected reason, expected tokens
            (30, LIMIT, FinishReason.STOP, at + 1),
            (at + 1, LIMIT, FinishReason.STOP, at + 1),
            (at + 1, at + 1, FinishReason.STOP, at + 1),
            (at, LIMIT, FinishReason.WINDOW, at),
            (at, at, FinishReason.LENGTH, at),
            (30, at, FinishReason.LENGTH, at),
        ]
        for window, limit, reason, num in cases:
            engine = start(num_slots=1, stop=(int(tokens[at]),))
            engine.submit(request(window=window, limit=limit))
            got = drain(engine)[request().trajectory]
            assert (got.finish_reason, got.tokens.size) == (reason, num)
            np.testing.assert_array_equal(got.tokens, tokens[:num])

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
        bare = self.make_engine(tiny_model(), num_slots=2)
        assert bare.policy_version == -1
        bare.submit(request())
        with pytest.raises(EngineError, match="first weights"):
            bare.advance(1)

    # -- a trajectory goes on identically ------------------------------------------------------------------------------

    def whole(self, start, numbers: Iterable[int], **options: Any) -> dict[int, Window]:
        """Sample each trajectory alone, in one window, in an engine of its own."""
        alone = {}
        for number in numbers:
            engine = start(num_slots=1)
            engine.submit(request(number, window=LIMIT, **options))
            alone[number] = drain(engine)[request(number).trajectory]
        return alone

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
        for other in (request(8, prompt=[3], window=2), request(9, prompt=[3], window=2)):  # both slots are wanted
            engine.submit(other)
        drain(engine)
        third = continued(second, window)
        engine.submit(third)
        drain(engine)
        assert engine.stats().num_prefill_tokens == before + third.prompt_tokens.size + third.response_tokens.size - 1

    def test_a_retained_slot_is_not_used_for_a_context_that_went_on_elsewhere(self, start, old) -> None:
        engine = start(stop=())
        first = request(window=5)
        engine.submit(first)
        window = drain(engine)[first.trajectory]
        elsewhere = continued(first, window)
        elsewhere.response_tokens[2] = (elsewhere.response_tokens[2] + 1) % VOCABULARY
        engine.submit(elsewhere)
        check_logprobs(old, elsewhere, drain(engine)[first.trajectory])

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
        for number in (0, 5, 7):  # live, waiting, unknown
            engine.forget(request(number).trajectory)
        got |= drain(engine)
        assert set(got) == {request(number).trajectory for number in (1, 2, 3, 4)}
        for number in (1, 2, 3, 4):
            np.testing.assert_array_equal(got[request(number).trajectory].tokens, alone[number].tokens)

    # -- weights in flight ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
    def test_a_swap_in_flight_makes_exact_segments_and_true_logprobs(self, start, old, new, kv_policy: str) -> None:
        engine = start(num_slots=4, stop=(), kv_policy=kv_policy)
        requests = [request(n, window=20) for n in range(4)]
        for each in requests:
            engine.submit(each)
        assert engine.advance(6) == []
        engine.load_weights(published(new), 5)
        assert engine.policy_version == 5
        windows = drain(engine)
        for each in requests:
            window = windows[each.trajectory]
            assert window.segments == (Segment(0, 6), Segment(5, 14))
            if kv_policy == "recompute":
                truth = np.concatenate([forward(old, each, window)[:6], forward(new, each, window)[6:]])
            else:
                truth = mixed_forward(old, new, each, window, swap_at=6)
            np.testing.assert_allclose(window.behavior_logprobs, truth, atol=1e-4)
            other = mixed_forward(old, new, each, window, swap_at=6) if kv_policy == "recompute" else None
            if other is not None:  # the policies differ, so the check above can fail
                assert np.abs(other - truth).max() > 1e-2

    def test_a_swap_between_windows_reaches_retained_rows_by_the_kv_policy(self, start, old, new) -> None:
        for kv_policy in ("keep", "recompute"):
            engine = start(num_slots=2, stop=(), kv_policy=kv_policy)
            first = request(prompt=range(2, 10), window=6)
            engine.submit(first)
            window = drain(engine)[first.trajectory]
            engine.load_weights(published(new), 1)
            engine.submit(continued(first, window))
            then = drain(engine)[first.trajectory]
            assert then.segments == (Segment(1, 6),)
            if kv_policy == "recompute":
                check_logprobs(new, continued(first, window), then)
            else:
                both = Window(
                    first.trajectory, np.concatenate([window.tokens, then.tokens]), EMPTY, (), then.finish_reason
                )
                truth = mixed_forward(old, new, first, both, swap_at=6)[6:]
                np.testing.assert_allclose(then.behavior_logprobs, truth, atol=1e-4)

    def test_two_swaps_without_a_token_between_them_leave_no_empty_segment(self, start, old, new) -> None:
        engine = start(stop=())
        engine.submit(request(window=8))
        engine.load_weights(published(new), 1)
        engine.advance(3)
        engine.load_weights(published(old), 2)
        engine.load_weights(published(new), 3)
        window = drain(engine)[request().trajectory]
        assert window.segments == (Segment(1, 3), Segment(3, 5))

    def test_weights_that_do_not_fit_are_rejected_and_the_old_ones_stay(self, start, old, new) -> None:
        good = published(new)
        name = "model.layers.1.mlp.up_proj.weight"
        wrong = {
            "missing": {k: v for k, v in good.items() if k != name},
            "unknown": good | {"model.layers.9.weight": torch.zeros(2)},
            "shape": good | {name: good[name].T.contiguous()},
            "type": good | {name: good[name].to(torch.int32)},
            "tied": good | {"lm_head.weight": good["model.embed_tokens.weight"] + 1},
        }
        engine = start(num_slots=2)
        for number, (complaint, tensors) in enumerate(wrong.items()):
            with pytest.raises(WeightsRejected, match=complaint):
                engine.load_weights(tensors, 1)
            assert engine.policy_version == 0
            engine.submit(request(number))
            check_logprobs(old, request(number), drain(engine)[request(number).trajectory])
        engine.load_weights(good | {"lm_head.weight": good["model.embed_tokens.weight"].clone()}, 1)
        engine.submit(request(0))
        check_logprobs(new, request(0), drain(engine)[request(0).trajectory])


def forward(model: PreTrainedModel, asked: WindowRequest, window: Window) -> np.ndarray:
    """Return the log-probs of a window by a plain forward."""
    with torch.no_grad():
        sequence = np.concatenate([asked.prompt_tokens, asked.response_tokens, window.tokens])
        return plain_logprobs(model, sequence, window.tokens.size, 1.0).numpy()


def mixed_forward(
    old: PreTrainedModel, new: PreTrainedModel, asked: WindowRequest, window: Window, *, swap_at: int
) -> np.ndarray:
    """Return log-probs when keys and values up to the swap are the old policy's: transformers' own cache, handed over.

    The last token before the swap is fed after it, hence under the new weights.
    """
    sequence = torch.from_numpy(np.concatenate([asked.prompt_tokens, window.tokens]).astype(np.int64))[None]
    cut = asked.prompt_tokens.size + swap_at - 1
    with torch.no_grad():
        before = old(sequence[:, :cut], use_cache=True)
        after = new(sequence[:, cut:], past_key_values=before.past_key_values, use_cache=True)
    logits = torch.cat([before.logits, after.logits], 1)[0, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(1, sequence[0, 1:, None])[:, 0]
    return logprobs[asked.prompt_tokens.size - 1 :].numpy()
