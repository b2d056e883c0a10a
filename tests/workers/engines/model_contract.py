"""The contract of every generation engine around a model: it samples from that model's own
distribution, whatever happens to weights.

The truth is a plain forward of transformers' own attention over one sequence at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from protocol.errors import WeightsRejected
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Segment
from tests.workers.engines.distributions import check_window
from tests.workers.engines.generation_contract import (
    EMPTY,
    LIMIT,
    STOP,
    GenerationContract,
    continued,
    drain,
    request,
)
from tests.workers.engines.tiny import VOCABULARY, plain_logprobs, tiny_model, tiny_tokenizer
from workers.engines.generation.seam import GenerationEngine, SampledWindow, SamplingParams, WindowRequest

KINDS = [
    SamplingParams(1.0, top_k=3),
    SamplingParams(1.0, top_p=0.4),
    SamplingParams(0.8),
    SamplingParams(0.0),
    SamplingParams(1.3, min_p=0.2),
    SamplingParams(1.2, 0.9, 20, 0.02),
    SamplingParams(0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.3),
    SamplingParams(1.0, 0.9, min_p=0.05, repetition_penalty=0.8),
]


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's weights as they are published: tied ones once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def check_logprobs(model: PreTrainedModel, asked: WindowRequest, window: SampledWindow, *, atol: float = 1e-4) -> None:
    """Compare behaviour log-probs with a plain forward, at the request's temperature (1 for
    greedy)."""
    sequence = np.concatenate([asked.prompt_tokens, asked.response_tokens, window.tokens])
    with torch.no_grad():
        truth = plain_logprobs(model, sequence, window.tokens.size, asked.sampling.temperature or 1.0)
    np.testing.assert_allclose(window.behavior_logprobs, truth.numpy(), atol=atol)


class ModelContract(GenerationContract):
    """The tests. ``old`` and ``new`` are two policies of one architecture; version 0 is ``old``."""

    sliding: ClassVar[dict[str, int]] = {"max_window_layers": 1}
    """A model of which some layers, or all, look back only so far."""

    def num_kept(self, context: int) -> int:
        """Return how many keys and values a trajectory finds again that comes back with ``context``
        tokens."""
        return context - 1

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

    def bare(self, **options: Any) -> GenerationEngine:
        return self.make_engine(tiny_model(seed=99), **options)

    def weights(self, version: int) -> Mapping[str, Any]:
        return published(tiny_model(seed=1 + version % 2))

    def check(self, asked: WindowRequest, window: SampledWindow) -> None:
        check_logprobs(tiny_model(seed=1).eval(), asked, window)

    @pytest.fixture
    def old(self) -> PreTrainedModel:
        return tiny_model(seed=1).eval()

    @pytest.fixture
    def new(self) -> PreTrainedModel:
        return tiny_model(seed=2).eval()

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
            # Qwen2's head is its share of the hidden size
            changes: dict[str, Any] = {"tie_word_embeddings": tied, "hidden_size": 128}
            policy = tiny_model(architecture, seed=5, **changes).eval()
            engine = self.make_engine(tiny_model(architecture, **changes), num_slots=4)
            engine.load_weights(published(policy), 3)
            requests = [request(n) for n in range(6)]
            for each in requests:
                engine.submit(each)
            windows = drain(engine)
            for each in requests:
                check_logprobs(policy, each, windows[each.trajectory])

    def test_a_sliding_window_is_respected_in_prefill_and_decode(self) -> None:
        changes: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7} | self.sliding
        policy = tiny_model("qwen2", seed=6, **changes).eval()
        engine = self.make_engine(tiny_model("qwen2", **changes), num_slots=4)
        engine.load_weights(published(policy), 0)
        requests = [request(n, window=30) for n in range(6)]
        for each in requests:
            engine.submit(each)
        windows = drain(engine)
        for each in requests:
            check_logprobs(policy, each, windows[each.trajectory])

    def test_contexts_that_are_too_much_to_fill_in_at_once_are_filled_in_bit_by_bit(self, start, old) -> None:
        rng = np.random.default_rng(7)
        requests = [request(n, prompt=rng.integers(2, VOCABULARY, size=440)) for n in range(16)]
        engine = start(num_slots=16)
        for each in requests:
            engine.submit(each)
        windows = drain(engine)
        for each in requests:
            check_logprobs(old, each, windows[each.trajectory])

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

    def test_each_request_of_a_batch_is_sampled_from_its_own_distribution(self, start, old) -> None:
        requests = [request(n, sampling=KINDS[n % len(KINDS)]) for n in range(16)]
        engine = start(num_slots=16)
        for each in requests:
            engine.submit(each)
        windows = drain(engine)
        for each in requests:
            chances = check_window(old, each, windows[each.trajectory])
            if each.sampling.top_k or each.sampling.min_p:
                assert min((row > 0.0).sum() for row in chances) < VOCABULARY

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_penalties_count_over_windows_whoever_samples_them(self, start, old, elsewhere: bool) -> None:
        """They are large, so that a count that begins anew changes every log-prob."""
        kinds = [
            SamplingParams(0.8, frequency_penalty=1.1),
            SamplingParams(0.8, presence_penalty=1.5),
            SamplingParams(0.8, repetition_penalty=1.8),
            SamplingParams(0.0, repetition_penalty=1.3, frequency_penalty=0.7),
        ]
        engines = [start(num_slots=4, stop=()) for _ in range(3 if elsewhere else 1)]
        asked = [request(n, window=9, limit=27, sampling=kind) for n, kind in enumerate(kinds)]
        for turn in range(3):
            engine = engines[turn % len(engines)]
            for each in asked:
                engine.submit(each)
            windows = drain(engine)
            for each in asked:
                check_window(old, each, windows[each.trajectory])
            asked = [continued(each, windows[each.trajectory]) for each in asked]
        for number, kind in enumerate(kinds):
            alone = start(num_slots=2, stop=())
            alone.submit(request(number, window=27, limit=27, sampling=kind))
            whole = drain(alone)[asked[number].trajectory]
            np.testing.assert_array_equal(whole.tokens, asked[number].response_tokens)

    def test_a_window_ends_by_stop_by_window_or_by_length_and_exactly_there(self, start) -> None:
        free = start(num_slots=1, stop=())
        free.submit(request(window=30))
        tokens = drain(free)[request().trajectory].tokens
        # first seen at position `at`
        at = next(n for n in range(4, 30) if tokens[n] not in tokens[:n])
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

    @pytest.mark.parametrize("window", [1, 3, 40])
    def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(self, start, old, window: int) -> None:
        """It spans tokens, and with small windows their borders, and engines take turns."""
        tokenizer, numbers = tiny_tokenizer(), range(6)
        free = {n: each.tokens for n, each in self.whole(start, numbers).items()}
        texts = {n: tokenizer.decode(tokens.tolist()) for n, tokens in free.items()}
        # of four letters, so that tokens share it; the first response has it late
        stop = texts[0][-9:-5]
        ends = {n: end_of(tokens, stop) for n, tokens in free.items()}
        assert ends[0] is not None
        assert free[0].size - 5 < ends[0] < free[0].size
        engines = [start(num_slots=4), start(num_slots=3)]
        asked = {n: request(n, window=window, stop_strings=("never", stop)) for n in numbers}
        reasons: dict[int, FinishReason] = {}
        num_sampled = turn = 0
        while len(reasons) < len(asked):
            engine, turn = engines[turn % 2], turn + 1
            for n in asked:
                if n not in reasons:
                    engine.submit(asked[n])
            for n, got in by_number(drain(engine)).items():
                check_window(old, asked[n], got)
                assert got.tokens.size == sum(segment.num_tokens for segment in got.segments) > 0
                num_sampled += got.tokens.size
                asked[n] = continued(asked[n], got)
                if got.finish_reason.is_final:
                    reasons[n] = got.finish_reason
        for n, end in ends.items():
            np.testing.assert_array_equal(asked[n].response_tokens, free[n][:end])
            by_itself = FinishReason.STOP if free[n][-1] == STOP else FinishReason.LENGTH
            assert reasons[n] == (by_itself if end is None else FinishReason.STOP)
        assert sum(engine.stats().num_sampled_tokens for engine in engines) == num_sampled

    def test_a_stop_string_wins_over_a_limit_at_the_same_token_and_a_limit_before_it(self, start) -> None:
        free = self.whole(start, [0])[0].tokens
        stop = tiny_tokenizer().decode(free.tolist())[10:13]
        end = end_of(free, stop)
        assert end is not None
        for limit, reason in ((end, FinishReason.STOP), (end - 1, FinishReason.LENGTH)):
            for window in (2, limit):
                engine, asked = start(), request(window=window, limit=limit, stop_strings=(stop,))
                while True:
                    engine.submit(asked)
                    (got,) = drain(engine).values()
                    asked = continued(asked, got)
                    if got.finish_reason.is_final:
                        break
                assert (got.finish_reason, asked.response_tokens.size) == (reason, limit)

    def test_a_request_that_has_left_leaves_no_stop_string_behind(self, start) -> None:
        free = self.whole(start, [0])[0].tokens
        text = tiny_tokenizer().decode(free.tolist())
        stop = text[12:16]
        end = end_of(free, stop)
        assert end is not None
        for leave in ("cut", "forget", "window"):
            engine = start(num_slots=1)
            asked = request(window=2 if leave == "window" else LIMIT, stop_strings=(stop,))
            engine.submit(asked)
            early = engine.advance(2)
            assert len(early) == (leave == "window")
            if leave == "forget":
                engine.forget(asked.trajectory)
            else:
                (window,) = early or engine.cut()
                asked = replace(continued(asked, window), window_tokens=LIMIT)
            # the same trajectory without stop strings, and then with them
            engine.submit(replace(asked, stop_strings=()))
            (whole,) = drain(engine).values()
            np.testing.assert_array_equal(np.concatenate([asked.response_tokens, whole.tokens]), free)
            num_steps = engine.stats().num_decode_steps
            engine.submit(asked)
            (rest,) = drain(engine).values()
            np.testing.assert_array_equal(np.concatenate([asked.response_tokens, rest.tokens]), free[:end])
            # nothing is decoded that would be thrown away
            assert engine.stats().num_decode_steps - num_steps <= rest.tokens.size + 2 < free.size

    def test_a_retained_slot_is_not_used_for_a_context_that_went_on_elsewhere(self, start, old) -> None:
        engine = start(stop=())
        first = request(window=5)
        engine.submit(first)
        window = drain(engine)[first.trajectory]
        elsewhere = continued(first, window)
        elsewhere.response_tokens[2] = (elsewhere.response_tokens[2] + 1) % VOCABULARY
        engine.submit(elsewhere)
        check_logprobs(old, elsewhere, drain(engine)[first.trajectory])

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
            mixed = mixed_forward(old, new, each, window, kept=each.prompt_tokens.size + 5)
            if kv_policy == "recompute":
                truth = np.concatenate([forward(old, each, window)[:6], forward(new, each, window)[6:]])
            else:
                truth = mixed
            np.testing.assert_allclose(window.behavior_logprobs, truth, atol=1e-4)
            # the policies differ, so the check above can fail
            if kv_policy == "recompute":
                assert np.abs(mixed - truth).max() > 1e-2

    def test_a_swap_between_windows_reaches_what_is_kept_by_the_kv_policy(self, start, old, new) -> None:
        for kv_policy in ("keep", "recompute"):
            engine = start(num_slots=2, stop=(), kv_policy=kv_policy)
            first = request(prompt=range(2, 42), window=6)
            engine.submit(first)
            window = drain(engine)[first.trajectory]
            engine.load_weights(published(new), 1)
            engine.submit(continued(first, window))
            then = drain(engine)[first.trajectory]
            assert then.segments == (Segment(1, 6),)
            if kv_policy == "recompute":
                check_logprobs(new, continued(first, window), then)
            else:
                both = SampledWindow(
                    first.trajectory, np.concatenate([window.tokens, then.tokens]), EMPTY, (), then.finish_reason
                )
                truth = mixed_forward(old, new, first, both, kept=self.num_kept(46))[6:]
                np.testing.assert_allclose(then.behavior_logprobs, truth, atol=1e-4)

    def test_a_cut_between_a_swap_and_the_next_token_keeps_nothing_of_the_old_weights(self, start, old, new) -> None:
        engine = start(num_slots=2, stop=(), kv_policy="recompute")
        first = request(prompt=range(2, 42), window=12)
        engine.submit(first)
        engine.advance(4)
        engine.load_weights(published(new), 1)
        [window] = engine.cut()
        assert window.segments == (Segment(0, 4),)
        engine.submit(continued(first, window))
        check_logprobs(new, continued(first, window), drain(engine)[first.trajectory])

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


def end_of(tokens: np.ndarray, stop: str) -> int | None:
    """Return after how many tokens the text holds a stop string; None when it never does."""
    tokenizer = tiny_tokenizer()
    return next((n for n in range(1, tokens.size + 1) if stop in tokenizer.decode(tokens[:n].tolist())), None)


def by_number(windows: Mapping[TrajectoryId, SampledWindow]) -> dict[int, SampledWindow]:
    """Return windows by the number of their request."""
    return {4 * name.group + name.member: window for name, window in windows.items()}


def forward(model: PreTrainedModel, asked: WindowRequest, window: SampledWindow) -> np.ndarray:
    """Return the log-probs of a window by a plain forward."""
    with torch.no_grad():
        sequence = np.concatenate([asked.prompt_tokens, asked.response_tokens, window.tokens])
        return plain_logprobs(model, sequence, window.tokens.size, 1.0).numpy()


def mixed_forward(
    old: PreTrainedModel, new: PreTrainedModel, asked: WindowRequest, window: SampledWindow, *, kept: int
) -> np.ndarray:
    """Return log-probs when the first ``kept`` keys and values are the old policy's: transformers'
    own cache, handed over.

    In a swap after n sampled tokens, prompt + n - 1 are: the last token before it is fed after it,
    under the new weights."""
    sequence = torch.from_numpy(np.concatenate([asked.prompt_tokens, window.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        before = old(sequence[:, :kept], use_cache=True)
        after = new(sequence[:, kept:], past_key_values=before.past_key_values, use_cache=True)
    logits = torch.cat([before.logits, after.logits], 1)[0, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(1, sequence[0, 1:, None])[:, 0]
    return logprobs[asked.prompt_tokens.size - 1 :].numpy()
