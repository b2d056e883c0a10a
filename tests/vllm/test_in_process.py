# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM in this process keeps the generation contract."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import ClassVar, Literal

import numpy as np
import pytest
from transformers import PreTrainedModel

from protocol.trajectory import FinishReason
from tests.vllm.cores import BLOCK, POSITIONS, CorePool
from tests.workers.engines.distributions import check_window
from tests.workers.engines.generation_contract import continued, drain, request
from tests.workers.engines.model_contract import KINDS, ModelContract, published
from tests.workers.engines.tiny import VOCABULARY, tiny_tokenizer
from workers.engines.generation.seam import GenerationEngine, SampledWindow
from workers.engines.generation.vllm.engine import VllmEngine
from workers.engines.model.loading import model_state


class TestVllmInProcess(ModelContract):
    @pytest.fixture(autouse=True)
    def _cores(self, cores: CorePool) -> None:
        self.cores = cores

    def make_engine(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        stop: Iterable[int] = (1,),
        kv_policy: Literal["keep", "recompute"] = "keep",
    ) -> GenerationEngine:
        return VllmEngine(
            self.cores.take(model),
            model_state(model.config),
            num_slots=num_slots,
            vocabulary=VOCABULARY,
            positions=POSITIONS,
            stop_token_ids=stop,
            kv_policy=kv_policy,
            tokenizer=tiny_tokenizer(),
        )

    # vLLM refuses a Qwen2 of which only some layers slide
    sliding: ClassVar[dict[str, int]] = {"max_window_layers": 0, "hidden_size": 128}

    def num_kept(self, context: int) -> int:
        return (context - 1) // BLOCK * BLOCK

    def test_a_returning_trajectory_is_not_prefilled_again_while_its_slot_is_free(self, start) -> None:
        """vLLM has no slots: whole blocks are kept, and the last token is always computed."""
        engine = start(num_slots=2, stop=())
        first = request(prompt=range(2, 62), window=12)
        engine.submit(first)
        second = continued(first, drain(engine)[first.trajectory])
        assert engine.stats().num_prefill_tokens == 60
        engine.submit(second)
        drain(engine)
        assert engine.stats().num_prefill_tokens == 60 + 72 - self.num_kept(72) < 132

    def test_penalties_and_min_p_are_those_of_vllms_own_sampler(self, old) -> None:
        """vLLM samples a request without a stream of ours: the definition holds there too."""
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        core = self.cores.take(old)
        core.load(published(old), 0, recompute=True)
        for number, kind in enumerate(KINDS):
            asked = request(number, window=20, sampling=kind)
            params = VllmParams(
                **{field.name: getattr(kind, field.name) for field in fields(kind)},
                max_tokens=20,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                seed=number,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            core.llm.add_request("plain", {"prompt_token_ids": asked.prompt_tokens.tolist()}, params)
            while not (outputs := core.llm.step()):
                pass
            (completion,) = outputs[0].outputs
            tokens = np.array(completion.token_ids, np.int32)
            told = [row[token].logprob for token, row in zip(tokens.tolist(), completion.logprobs, strict=True)]
            if kind.temperature == 0.0:
                continue
            window = SampledWindow(asked.trajectory, tokens, np.array(told, np.float32), (), FinishReason.LENGTH)
            check_window(old, asked, window)
