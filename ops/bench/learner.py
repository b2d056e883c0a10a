"""How fast the learner steps on packed sequences, against padded micro-batches and TRL's trainer.

All contenders compute the same loss of the same samples on the same weights, which is checked before the
timing, and make the same AdamW step. TRL's is its GRPO trainer's own (``ops.bench.trl_step``), where TRL is
installed. The padded one is a plain loop over micro-batches of equal size, each padded to its longest sequence.
It keeps the order of the sequences, uses the model's own attention with a mask, and computes logits for every
position. Both compete at their fastest micro-batch size.

With a model of one's own the samples are groups of 8 with one prompt each, and answers whose lengths are spread
around the median (standard deviation of the logarithm 0.3). Rivals are TRL, our own step with nothing shared, whose
gradient is compared too, and the step's matrix products alone: of each linear layer and the head, forward and
backward, for the distinct tokens. The old log-probs are the model's, and in bfloat16 all keep float32 masters and
compute under autocast.

Seconds are this process's processor seconds. One thread computes everything, so another process on the machine
stretches only the wall clock.

    python -m ops.bench.learner --json bench-results/learner.json
    python -m ops.bench.learner --model runs/models/smollm2 --prompt 46 --answer 12 --dtype bfloat16"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ops.bench.table import Spread, interleaved, provenance, ratios, show, write_json
from ops.ending import exit_code
from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample, plan_micro_batches
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.loss import policy_loss
from pipeline.algorithms.prefixes import SharedPrefixes
from workers.engines.model import packed as packed_rows
from workers.engines.model.loading import load_model, resolve_dtype
from workers.engines.model.packed import planned_prefixes
from workers.engines.training.policy_gradient import ForwardSettings, PackedPolicy, accumulate_gradient
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

RATE = 0.0
"""The optimiser does all its work and leaves the weights, so that every step has the same loss."""

BAR_MODEL = 2.0
"""For a model of one's own, over TRL."""
BAR_PRODUCTS = 0.5
"""Least speed of the step in bfloat16, over its matrix products alone."""
BAR_WINDOWS = 1.5
"""Most tokens through the model for the windows of responses, over those of one pass of whole responses."""
GROUP = 8
PROMPTS = (46, 400)
ANSWERS = (12, 200)
UNSHARED = "unshared"
PRODUCTS = "products"
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Of losses, relative to the mean size of an advantage."""


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
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

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


def rivals() -> dict[str, Callable[..., Step]]:
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
        copy.deepcopy(model), ForwardSettings(1.0, MAX_TOKENS), OptimizerSettings(learning_rate=RATE)
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


def make_groups(model: PreTrainedModel, num_groups: int, prompt: int, answer: int) -> list[TrainingSample]:
    """Make groups of random tokens, each with one prompt, and answers of log-normal lengths."""
    rng, vocabulary = np.random.default_rng(0), int(model.config.vocab_size)
    law = NormalDist(np.log(answer), 0.3)
    lengths = [round(np.exp(law.inv_cdf((rank + 0.5) / GROUP))) for rank in range(GROUP)]
    shape = Shape("", 0, 0, vocabulary, num_groups * GROUP)
    samples: list[TrainingSample] = []
    for number, sample in enumerate(make_samples(shape)):
        question = np.random.default_rng(number // GROUP + 1).integers(2, vocabulary, prompt)
        size = lengths[number % GROUP]
        tokens = np.concatenate([question, rng.integers(2, vocabulary, size)]).astype(np.int32)
        ones, zeros = np.ones(size, np.float32), np.zeros(size, np.int32)
        samples.append(
            replace(
                sample, tokens=tokens, prompt_length=prompt, loss_mask=ones > 0, behavior_logprobs=-ones,
                advantages=sample.advantages[0] * ones, versions=zeros, old_logprobs=None,
            )
        )  # fmt: skip
    own = TorchTraining(copy.deepcopy(model), ForwardSettings(1.0, MAX_TOKENS), OptimizerSettings(learning_rate=RATE))
    return [
        replace(sample, behavior_logprobs=found, old_logprobs=found)
        for sample, found in zip(samples, own.response_logprobs(samples), strict=True)
    ]


@contextmanager
def sharing(shared: bool) -> Iterator[None]:
    with patch.object(packed_rows, "_has_shared_rows", lambda device: shared):
        yield


def gradient(policy: PackedPolicy, samples: list[TrainingSample], rule: Rule) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a step that is not made."""
    model = policy.model
    plan = plan_micro_batches(planned_prefixes(model, [sample.tokens for sample in samples]), MAX_TOKENS)
    loss = accumulate_gradient(policy, samples, rule, plan, model.device).sums["loss"]
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return float(loss), found


def products(model: Any, num_tokens: int, num_scored: int, dtype: torch.dtype) -> tuple[Any, float]:
    """Return a function that multiplies what the step's linear layers do, and the operations in it."""
    layers = [one.weight.shape for one in model.model.layers.modules() if isinstance(one, torch.nn.Linear)]
    sizes = [(num_tokens, *shape) for shape in layers] + [(num_scored, *model.get_input_embeddings().weight.shape)]
    made: dict[Any, tuple[torch.Tensor, ...]] = {
        (n, out, into): tuple(torch.randn(size, dtype=dtype) for size in ((n, into), (out, into), (n, out)))
        for n, out, into in sizes
    }

    def run() -> None:
        for size in sizes:
            states, weight, grads = made[size]
            _ = states @ weight.T, grads @ weight, grads.T @ states

    return run, 6.0 * sum(n * out * into for n, out, into in sizes)


def window_costs(samples: list[TrainingSample], num_windows: int = 8) -> dict[str, float]:
    """Return the tokens through the model for windows of responses, over those of one pass of the responses: with
    all windows of a response in one update, and with each in another."""
    ends = [np.linspace(s.prompt_length, s.tokens.size, num_windows + 1).astype(int)[1:] for s in samples]
    turns = [[s.tokens[: end[turn]] for s, end in zip(samples, ends, strict=True)] for turn in range(num_windows)]

    def cost(sequences: list[np.ndarray]) -> int:
        prefixes = SharedPrefixes.of(sequences)
        return sum(prefixes.take(micro).num_tokens for micro in plan_micro_batches(prefixes, MAX_TOKENS))

    whole = sum(sample.tokens.size for sample in samples)
    return {"one update": cost([*chain.from_iterable(turns)]) / whole, "eight updates": sum(map(cost, turns)) / whole}


def measure_model(
    model: PreTrainedModel, name: str, prompt: int, answer: int, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    """Measure groups at one size. Raises SystemExit if losses or gradients differ."""
    num_groups = 1 if prompt + answer >= max(ANSWERS) else 2
    samples, rule = make_groups(model, num_groups, prompt, answer), Dapo.of()
    forward = ForwardSettings(1.0, MAX_TOKENS, None if dtype == torch.float32 else dtype)
    ours = {
        shared: TorchTraining(copy.deepcopy(model), forward, OptimizerSettings(learning_rate=RATE))
        for shared in (True, False)
    }
    steps: dict[str, Callable[[list[TrainingSample]], float]] = {}
    gradients: dict[bool, tuple[float, torch.Tensor]] = {}

    def step(chosen: list[TrainingSample], shared: bool) -> float:
        with sharing(shared):
            return ours[shared].step(chosen, rule).loss

    for shared, training in ours.items():
        with sharing(shared):
            gradients[shared] = gradient(PackedPolicy(training._model, forward), samples, rule)
        steps["packed" if shared else UNSHARED] = partial(step, shared=shared)
    losses = {UNSHARED: gradients[False][0]}
    apart = float((gradients[True][1] - gradients[False][1]).norm() / gradients[False][1].norm())
    for size in PADDED_SIZES[:2] if "TRL" in rivals() else ():
        trl = rivals()["TRL"](copy.deepcopy(model), size, dtype=dtype)
        steps[f"TRL, {size} at a time"] = partial(trl.step, rule=rule)
    for contender, run in steps.items():
        # makes the optimiser's state; the rate of 0 leaves the weights
        run(samples[:1])
        if contender == f"TRL, {PADDED_SIZES[0]} at a time":
            losses[contender] = run(samples)
    scale = float(np.mean([abs(sample.advantages[0]) for sample in samples]))
    differences = {name: abs(loss - gradients[True][0]) / scale for name, loss in losses.items()}
    if max(differences.values()) > _TOLERANCES[dtype] or (dtype == torch.float32 and apart > 1e-5):
        raise SystemExit(f"losses differ by {differences}, gradients by {apart}; they must be equal to be compared")
    contenders: dict[str, Callable[[], object]] = {name: partial(run, samples) for name, run in steps.items()}
    prefixes = SharedPrefixes.of([sample.tokens for sample in samples])
    num_scored = sum(sample.tokens.size - sample.prompt_length for sample in samples)
    contenders[PRODUCTS], operations = products(model, prefixes.num_tokens, num_scored, dtype)
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": prompt,
        "answer_median": answer,
        "sequences": len(samples),
        "tokens": int(prefixes.lengths.sum()),
        "distinct_tokens": prefixes.num_tokens,
        "loss_differences": differences,
        "gradient_difference": apart,
        "window_costs": window_costs(samples),
        "operations": operations,
        "seconds": best_of_trl(interleaved(contenders, rounds=rounds, warmup=0, clock=time.process_time)),
    }


def best_of_trl(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Add TRL's time at its faster micro-batch size, round by round."""
    theirs = [taken for name, taken in seconds.items() if name.startswith("TRL")]
    return seconds | ({"TRL": [min(turn) for turn in zip(*theirs, strict=True)]} if theirs else {})


def show_models(results: list[dict[str, Any]]) -> list[str]:
    """Print what was measured; return what is below a bar."""
    rows: list[tuple[object, ...]] = []
    short: list[str] = []
    for result in results:
        cell = f"{result['dtype']}, {result['prompt_tokens']} + {result['answer_median']}"
        taken = Spread.of(result["seconds"]["packed"]).median
        over = speedups(result)
        rows.append((
            cell, result["tokens"], result["distinct_tokens"], result["tokens"] / taken,
            str(over.get("TRL", "-")), str(over[UNSHARED]), result["operations"] / taken / 1e9, str(over[PRODUCTS]),
            result["gradient_difference"],
        ))  # fmt: skip
        bars = {"TRL": BAR_MODEL} | ({PRODUCTS: BAR_PRODUCTS} if result["dtype"] == "bfloat16" else {})
        short += [
            f"{cell}, {name}: {over[name]}" for name, bar in bars.items() if name in over and over[name].median < bar
        ]
        if (cost := result["window_costs"]["one update"]) > BAR_WINDOWS:
            short.append(f"{cell}: windows cost {cost:.2f}")
    columns = ("cell", "tokens", "distinct", "tok/s", "over TRL", "over unshared", "GFLOP/s", "of products", "gradient")
    show(f"Learner on {results[0]['model']}: one optimiser step, one thread", columns, rows)
    return short


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
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="measure only the first N models", metavar="N")
    parser.add_argument("--model", type=Path, help="measure this model folder instead of the random models")
    parser.add_argument("--dtype", action="append", help="what it computes in (default: float32 and bfloat16)")
    parser.add_argument("--prompt", type=int, action="append", help="tokens of its prompts (default: 46 and 400)")
    parser.add_argument("--answer", type=int, action="append", help="median answer (default: 12 and 200 tokens)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    told = provenance("learner", arguments, rounds=options.rounds, seed=0)
    if options.model is not None:
        model = load_model(options.model, torch.float32, torch.device("cpu"))
        results = [
            measure_model(model, options.model.name, prompt, answer, resolve_dtype(dtype), options.rounds)
            for dtype in options.dtype or ("float32", "bfloat16")
            for answer in options.answer or ANSWERS
            for prompt in options.prompt or PROMPTS
        ]
        short = show_models(results)
        print("\n".join(["below the bar:", *short]) if short else "every bar holds")
        if options.json:
            write_json(options.json, told | {"bars": [BAR_MODEL, BAR_PRODUCTS, BAR_WINDOWS], "results": results})
        return int(bool(short))
    results = [measure(shape, options.rounds) for shape in SHAPES[: options.shapes]]
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
        write_json(options.json, told | {"bar": BAR, "results": results})
    slow = [f"{r['model']} against {name}" for r in results for name, s in speedups(r).items() if s.median < BAR]
    if slow:
        print(f"below the bar of {BAR}: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
