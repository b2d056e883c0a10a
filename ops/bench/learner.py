"""How fast the learner steps on packed sequences, against padded micro-batches and TRL's trainer.

All contenders compute the same loss of the same samples on the same weights, which is checked before the
timing, and make the same AdamW step. TRL's is its GRPO trainer's own (``ops.bench.trl_step``), where TRL is
installed. The padded one is a plain loop over micro-batches of equal size, each padded to its longest sequence.
It keeps the order of the sequences, uses the model's own attention with a mask, and computes logits for every
position. Both compete at their fastest micro-batch size.

Seconds are this process's processor seconds. One thread computes everything, so another process on the machine
stretches only the wall clock.

    python -m ops.bench.learner --json bench-results/learner.json"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ops.bench.table import Spread, interleaved, provenance, ratios, show, write_json
from ops.ending import exit_code
from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.loss import policy_loss
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import OptimizerSettings, TorchTraining

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

BAR = 1.5
"""Least packed tokens a second of the learner, over the fastest rival's."""

MAX_TOKENS = 4096
"""Budget of a packed micro-batch."""

PADDED_SIZES = (4, 8, 16, 32)
"""Sizes that are tried for a padded micro-batch, in sequences."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    layers: int
    vocabulary: int
    num_samples: int


SHAPES = (
    Shape("demo", hidden=96, layers=2, vocabulary=32, num_samples=192),
    Shape("10M", hidden=384, layers=5, vocabulary=2048, num_samples=24),
)


def make_model(hidden: int, layers: int, vocabulary: int, *, head_dim: int = 32) -> Qwen3ForCausalLM:
    """Make a random Qwen3 in float32; every call makes the same one."""
    torch.manual_seed(0)
    heads = hidden // head_dim
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=head_dim,
            vocab_size=vocabulary,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=1,
        )
    )


def make_samples(shape: Shape, seed: int = 0) -> list[TrainingSample]:
    """Make responses of log-normal lengths (median 60, the longest several times that), in random order."""
    rng = np.random.default_rng(seed)
    ranks = (np.arange(shape.num_samples) + 0.5) / shape.num_samples
    law = NormalDist(np.log(60.0), 0.8)
    lengths = rng.permutation([int(np.exp(law.inv_cdf(rank))) for rank in ranks])
    samples: list[TrainingSample] = []
    for number, length in enumerate(lengths):
        prompt = int(rng.integers(6, 20))
        old = np.full(length, -np.log(shape.vocabulary), dtype=np.float32)
        samples.append(
            TrainingSample(
                name=f"t.{number}.0",
                tokens=rng.integers(2, shape.vocabulary, prompt + length).astype(np.int32),
                prompt_length=prompt,
                loss_mask=np.ones(length, dtype=np.bool_),
                advantages=np.full(length, rng.normal(), dtype=np.float32),
                behavior_logprobs=old,
                versions=np.zeros(length, dtype=np.int32),
                old_logprobs=old,
            )
        )
    return samples


class PaddedStep:
    """The same step as a plain training loop would write it."""

    def __init__(self, model: PreTrainedModel, micro_batch_size: int) -> None:
        self._model = model.eval()
        self.size = micro_batch_size
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def step(self, samples: Sequence[TrainingSample], rule: Rule) -> float:
        weights = rule.token_weights(samples)
        total = 0.0
        for start in range(0, len(samples), self.size):
            total += self._micro_batch(samples[start : start + self.size], weights[start : start + self.size], rule)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _micro_batch(self, samples: Sequence[TrainingSample], weights: list[np.ndarray], rule: Rule) -> float:
        shape = (len(samples), max(sample.tokens.size for sample in samples))
        tokens, attention = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.bool)
        advantages, old, weight = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        for row, (sample, own) in enumerate(zip(samples, weights, strict=True)):
            end = sample.tokens.size
            response = slice(sample.prompt_length, end)
            tokens[row, :end] = torch.from_numpy(sample.tokens)
            attention[row, :end] = 1
            mask[row, response] = torch.from_numpy(sample.loss_mask)
            advantages[row, response] = torch.from_numpy(sample.advantages)
            old[row, response] = torch.from_numpy(sample.behavior_logprobs)
            weight[row, response] = torch.from_numpy(own).float()
        logits = self._model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, :-1].float()
        everything = torch.log_softmax(logits, dim=-1)
        logprobs = everything.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        entropy = -(everything.detach().exp() * everything.detach()).sum(dim=-1)
        losses, _ = policy_loss(
            rule,
            logprobs=logprobs.flatten(),
            old_logprobs=old[:, 1:].flatten(),
            behavior_logprobs=old[:, 1:].flatten(),
            reference_logprobs=None,
            entropy=entropy.flatten(),
            advantages=advantages[:, 1:].flatten(),
            mask=mask[:, 1:].flatten(),
            row_ids=torch.arange(shape[0]).repeat_interleave(shape[1] - 1),
            num_rows=shape[0],
        )
        loss = (losses * weight[:, 1:].flatten()).sum()
        loss.backward()
        return float(loss.detach())


class Step(Protocol):
    """A contender that steps on micro-batches of ``size`` sequences."""

    @property
    def size(self) -> int: ...

    def step(self, samples: Sequence[TrainingSample], rule: Rule) -> float: ...


def fastest(
    make: Callable[[PreTrainedModel, int], Step],
    model: PreTrainedModel,
    samples: list[TrainingSample],
    rule: Rule,
) -> Step:
    """Return a contender at its fastest micro-batch size, on the weights of ``model``."""
    times: dict[int, float] = {}
    for size in PADDED_SIZES:
        trial = make(copy.deepcopy(model), size)
        started = time.process_time()
        trial.step(samples, rule)
        times[size] = time.process_time() - started
    return make(copy.deepcopy(model), min(times, key=times.__getitem__))


def rivals() -> dict[str, Callable[[PreTrainedModel, int], Step]]:
    """Return the rivals that are installed."""
    if importlib.util.find_spec("trl") is None:
        return {"padded": PaddedStep}
    from ops.bench.trl_step import TrlStep

    return {"padded": PaddedStep, "TRL": TrlStep}


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Measure one shape. Raises SystemExit if the contenders do not compute the same loss."""
    samples = make_samples(shape)
    lengths = np.array([sample.tokens.size for sample in samples])
    num_tokens = int(lengths.sum())
    model = make_model(shape.hidden, shape.layers, shape.vocabulary)
    rule = Dapo.of()
    packed = TorchTraining(
        copy.deepcopy(model), ForwardSettings(1.0, MAX_TOKENS), OptimizerSettings(learning_rate=1e-6)
    )
    others = {name: fastest(make, model, samples, rule) for name, make in rivals().items()}
    ours = packed.step(samples, rule).loss
    losses = {name: other.step(samples, rule) for name, other in others.items()}
    for name, loss in losses.items():
        if abs(ours - loss) > 1e-5 * abs(loss):
            raise SystemExit(f"{shape.name}: packed loss {ours}, {name} {loss}; they must be equal to be compared")
    contenders = {"packed": lambda: packed.step(samples, rule)} | {
        name: lambda other=other: other.step(samples, rule) for name, other in others.items()
    }
    seconds = interleaved(contenders, rounds=rounds, clock=time.process_time)
    return {
        "model": shape.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": num_tokens,
        "p99_over_median": float(np.percentile(lengths, 99) / np.median(lengths)),
        "micro_batches": {name: other.size for name, other in others.items()},
        "loss_differences": {name: abs(ours - loss) for name, loss in losses.items()},
        "seconds": seconds,
    }


def speedups(result: dict[str, Any]) -> dict[str, Spread]:
    """Return how much faster the packed step was than each rival's."""
    seconds: dict[str, list[float]] = result["seconds"]
    return {name: ratios(seconds["packed"], taken) for name, taken in seconds.items() if name != "packed"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every shape; return 1 if one is below the bar."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.learner",
        description="Time the learner's step on packed sequences against padded micro-batches and TRL's trainer.",
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, of which the median counts")
    parser.add_argument(
        "--model", choices=[shape.name for shape in SHAPES], action="append", help="measure only this one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = [measure(shape, options.rounds) for shape in SHAPES if not options.model or shape.name in options.model]
    rows = [
        (
            result["model"],
            result["parameters"],
            result["tokens"],
            result["p99_over_median"],
            f"{name}, {result['micro_batches'][name]} at a time",
            result["tokens"] / Spread.of(result["seconds"]["packed"]).median,
            result["tokens"] / Spread.of(result["seconds"][name]).median,
            str(speedup),
        )
        for result in results
        for name, speedup in speedups(result).items()
    ]
    columns = ("model", "weights", "tokens", "p99/p50", "against", "packed tok/s", "their tok/s", "speed-up")
    show("Learner: one optimiser step, one thread", columns, rows)
    if "TRL" not in rivals():
        print("TRL is not installed: make trl builds an environment with it, .venv-trl")
    if options.json:
        told = provenance("learner", arguments, rounds=options.rounds, seed=0)
        write_json(options.json, told | {"bar": BAR, "results": results})
    slow = [f"{r['model']} against {name}" for r in results for name, s in speedups(r).items() if s.median < BAR]
    if slow:
        print(f"below the bar of {BAR}: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
