"""TRL's GRPO step as a contender: its trainer's own loss, on batches padded as its trainer pads them.

This project does not depend on TRL: ``make trl`` builds an environment with both.

The trainer is a real one, with TRL's patched forward and its loss of type ``dapo``, the mean over all tokens of
the batch. Its generation, rewards and data loader are not used, because only learning is compared."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENIZER = Path("ops/demo/tiny_model")


class TrlStep:
    def __init__(self, model: PreTrainedModel, micro_batch_size: int, dtype: torch.dtype | None = None) -> None:
        """Compute in ``dtype`` with float32 masters, as the trainer does with bf16=True; None for bfloat16 on CUDA."""
        self.size = micro_batch_size
        self._autocast = torch.cuda.is_available() if dtype is None else dtype == torch.bfloat16
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-trl-")
        self._trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=_no_reward,
            args=GRPOConfig(
                output_dir=self._folder.name,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                report_to=[],
                loss_type="dapo",
                beta=0.0,
                epsilon=0.2,
                epsilon_high=0.28,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 8}),
            processing_class=AutoTokenizer.from_pretrained(_TOKENIZER),
        )
        # has no dropout
        self._model = self._trainer.model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    def step(self, samples: Sequence[TrainingSample], rule: Rule) -> float:
        """Do one optimiser step; return the loss. ``rule`` must be the default one, which this trainer
        implements."""
        trainer, num_micro = self._trainer, -(-len(samples) // self.size)
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = num_micro
        num_tokens = torch.tensor(sum(int(sample.loss_mask.sum()) for sample in samples))
        device, total = self._model.device, 0.0
        for start in range(0, len(samples), self.size):
            inputs = _inputs(samples[start : start + self.size], num_tokens)
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=self._autocast):
                loss = trainer.compute_loss(self._model, inputs)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _inputs(samples: Sequence[TrainingSample], num_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pad prompts on the left and completions on the right, as the trainer does."""
    prompts = [sample.tokens[: sample.prompt_length] for sample in samples]
    completions = [sample.tokens[sample.prompt_length :] for sample in samples]
    return {
        "prompt_ids": _padded(prompts, left=True),
        "prompt_mask": _padded([np.ones_like(prompt) for prompt in prompts], left=True),
        "completion_ids": _padded(completions),
        "completion_mask": _padded([sample.loss_mask.astype(np.int64) for sample in samples]),
        "advantages": _padded([sample.advantages for sample in samples], dtype=torch.float32),
        "old_per_token_logps": _padded(
            [s.behavior_logprobs if s.old_logprobs is None else s.old_logprobs for s in samples], dtype=torch.float32
        ),
        "num_items_in_batch": num_tokens,
    }


def _padded(rows: Sequence[np.ndarray], *, left: bool = False, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    width = max(row.size for row in rows)
    found = torch.zeros((len(rows), width), dtype=dtype)
    for number, row in enumerate(rows):
        found[number, width - row.size if left else 0 : width if left else row.size] = torch.from_numpy(row).to(dtype)
    return found
