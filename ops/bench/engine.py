# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""How fast the local engine samples on a CPU, against transformers (``generate``, continuous batching) and vLLM.

All contenders sample the same number of response tokens for the same prompts from the same weights, at
temperature 1 without truncation of the distribution, with a KV cache, on one thread. The length of each
response is forced, so that chance favours no contender: engines get a limit per request, and ``generate`` gets
a stopping criterion that ends each row at the same length, and pads the row until the longest has ended. The
lengths are log-normal with a 99th percentile above four times the median. They come in random order, because no
contender may know them beforehand.

Each contender gets as many places as the engine has slots, and four times as many sequences. ``generate`` runs
in batches of that size. With 64 slots it also runs with all sequences in one batch, and the bar is for the
faster of the two. The engine also records the log-prob of every token; the others do not. vLLM is driven as
``LLM.generate`` drives it, where it is installed (``make vllm``).

Seconds are this process's processor seconds. One thread computes everything, so another process on the machine
stretches only the wall clock.

    python -m ops.bench.engine --json bench-results/engine.json
    python -m ops.bench.engine --model runs/models/smollm2 --against vLLM --rounds 1 --json bench-results/smollm2.json

With a model of one's own, every prompt has exactly as many tokens as said, there are twice as many sequences as
slots, and a few tokens warm a contender up. vLLM forgets its prompts between rounds, as after new weights."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from ops.bench.sampling_work import LONGEST, SHAPES, VLLM_SETTINGS, Shape, Work, make_model, make_work, run_engine
from ops.bench.table import Spread, interleaved, provenance, ratios, show, write_json
from ops.ending import exit_code
from workers.engines.generation.local.engine import LocalEngine
from workers.engines.model.loading import load_model, resolve_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from workers.engines.generation.vllm.in_process import InProcessCore

ENGINE: Final = "engine"
GENERATE: Final = "generate"
BATCHING: Final = "continuous batching"
VLLM: Final = "vLLM"
CONTENDERS: Final = (GENERATE, BATCHING, VLLM)
BARS: Final = {GENERATE: 2.0, VLLM: 0.7}
"""Promised tokens a second of the engine over theirs, for models under 10 million weights."""
BARS_MODEL: Final = {GENERATE: 2.0, BATCHING: 2.0, VLLM: 1.0}
"""The same for a model of one's own; 1.3 times vLLM's with groups."""
GROUPED: Final = 1.3

SLOTS: Final = (1, 16, 64)
PROMPTS: Final = (4, 46, 400)
GROUPS: Final = (1, 8)
DTYPES: Final = ("bfloat16", "float32")
_SEQUENCES_PER_SLOT = 4
_SEQUENCES_PER_SLOT_MODEL = 2
_LEAST_SEQUENCES = 8
_WARM_TOKENS = 4
_PAGE_TOKENS = 16
_PATIENCE_S = 600.0


class EndsAt(StoppingCriteria):
    """Ends each row of a batch at its own response length."""

    def __init__(self, prompt_tokens: int, lengths: torch.Tensor) -> None:
        self._ends = prompt_tokens + lengths

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self._ends


@torch.inference_mode()
def run_generate(model: Any, work: Work, batch_size: int) -> int:
    """Sample with ``generate``, prompts padded on the left; return the number of response tokens."""
    total = 0
    for start in range(0, len(work.prompts), batch_size):
        prompts = work.prompts[start : start + batch_size]
        lengths = torch.from_numpy(work.lengths[start : start + batch_size])
        longest = max(prompt.size for prompt in prompts)
        padded = np.stack([np.pad(prompt, (longest - prompt.size, 0)) for prompt in prompts]).astype(np.int64)
        mask = np.stack([np.arange(longest) >= longest - prompt.size for prompt in prompts]).astype(np.int64)
        sampled: Any = model.generate(
            torch.from_numpy(padded),
            attention_mask=torch.from_numpy(mask),
            max_new_tokens=int(lengths.max()),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([EndsAt(longest, lengths)]),
        )
        assert sampled.shape == (len(prompts), longest + int(lengths.max()))
        total += int(lengths.sum())
    return total


@contextmanager
def continuous_batching(model: Any, longest_prompt: int, num_slots: int) -> Iterator[Callable[[Work, int], int]]:
    """Start the batching of transformers; yield a function that samples everything once and returns the number of
    response tokens."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    longest = longest_prompt + LONGEST
    settings = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=num_slots * -(-longest // _PAGE_TOKENS),
        max_batch_tokens=max(512, num_slots),
        max_requests_per_batch=num_slots,
        use_async_batching=False,
        use_cuda_graph=False,
    )
    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=settings)
    manager.start()

    def run(work: Work, turn: int) -> int:
        waiting = {
            manager.add_request(prompt.tolist(), request_id=f"{turn}-{number}", max_new_tokens=length)
            for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths.tolist(), strict=True))
        }
        total, deadline = 0, time.monotonic() + _PATIENCE_S
        while waiting and time.monotonic() < deadline:
            got = manager.get_result(timeout=1.0)
            if got is not None and got.is_finished():
                waiting.discard(got.request_id)
                total += len(got.generated_tokens)
        return total

    try:
        yield run
    finally:
        manager.stop(block=True)


def run_offline(llm: Any, work: Work, turn: int) -> int:
    """Sample with vLLM's engine as ``LLM.generate`` drives it; return the number of response tokens."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    assert llm.reset_prefix_cache()
    for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths.tolist(), strict=True)):
        params = VllmParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        llm.add_request(f"offline-{turn}-{number}", {"prompt_token_ids": prompt.tolist()}, params)
    total = 0
    while llm.has_unfinished_requests():
        total += sum(len(output.outputs[0].token_ids) for output in llm.step())
    return total


def prepare(model: PreTrainedModel, folder: Path, num_slots: int, positions: int = 2 * LONGEST) -> InProcessCore:
    """Start vLLM in this process on a model's weights, which are saved to ``folder``."""
    from workers.engines.generation.vllm.arguments import engine_arguments
    from workers.engines.generation.vllm.in_process import InProcessCore

    model.save_pretrained(folder)
    dtype = str(model.dtype).removeprefix("torch.")
    arguments = engine_arguments(folder, num_slots=num_slots, positions=positions, dtype=dtype, on_cpu=True)
    return InProcessCore(arguments | {"max_num_seqs": num_slots})


@contextmanager
def vllm(model: PreTrainedModel, num_slots: int) -> Iterator[Any]:
    """Start vLLM in this process on the model's weights; yield its engine."""
    with tempfile.TemporaryDirectory(prefix="headrace-vllm-") as folder:
        core = prepare(model, Path(folder), num_slots)
        core.load(dict(model.state_dict()), 0, recompute=False)
        yield core.llm


def measure(
    shape: Shape,
    rounds: int,
    model: PreTrainedModel,
    against: Sequence[str] = CONTENDERS,
    llm: Any = None,
    warm_tokens: int = LONGEST,
) -> dict[str, Any]:
    """Measure all contenders; a round of responses of at most ``warm_tokens`` comes first."""
    work = make_work(shape)
    warm = work
    if warm_tokens < LONGEST:
        warm = Work(work.prompts[:2], np.minimum(work.lengths[:2], warm_tokens))
    engine = LocalEngine(copy.deepcopy(model), num_slots=shape.num_slots)
    engine.load_weights(model.state_dict(), 0)
    runs: dict[str, Callable[[Work, int], int]] = {
        ENGINE: lambda work, turn: sum(one.tokens.size for one in run_engine(engine, work, turn, LONGEST)),
    }
    if GENERATE in against:
        runs[GENERATE] = lambda work, _: run_generate(model, work, shape.num_slots)
    if GENERATE in against and shape.num_slots == max(SLOTS) and warm is work:
        runs[f"{GENERATE}, one batch"] = lambda work, _: run_generate(model, work, shape.num_sequences)
    if llm is not None:
        runs[VLLM] = lambda work, turn: run_offline(llm, work, turn)
    with ExitStack() as stack:
        if BATCHING in against:
            longest = max(prompt.size for prompt in work.prompts)
            runs[BATCHING] = stack.enter_context(continuous_batching(copy.deepcopy(model), longest, shape.num_slots))
        turns = iter(range(1, 1_000_000))

        def contender(run: Callable[[Work, int], int], work: Work) -> Callable[[], None]:
            def timed() -> None:
                assert run(work, next(turns)) == int(work.lengths.sum())

            return timed

        for run in runs.values():
            contender(run, warm)()
        contenders = {name: contender(run, work) for name, run in runs.items()}
        seconds = interleaved(contenders, rounds=rounds, warmup=0, clock=time.process_time)
    return {
        "shape": shape.name,
        "dtype": str(model.dtype),
        "prompt_tokens": shape.prompt_tokens,
        "group_size": shape.group_size,
        "num_sequences": shape.num_sequences,
        "num_slots": shape.num_slots,
        "num_tokens": int(work.lengths.sum()),
        "median_length": float(np.median(work.lengths)),
        "p99_length": float(np.percentile(work.lengths, 99)),
        "seconds": seconds,
    }


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def with_slots(shape: Shape, num_slots: int, per_slot: int = _SEQUENCES_PER_SLOT) -> Shape:
    """Return the shape for an engine with this many slots."""
    return replace(shape, num_slots=num_slots, num_sequences=max(_LEAST_SEQUENCES, per_slot * num_slots))


def measure_model(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure a model of one's own with every combination of the options' values."""
    against = options.against or CONTENDERS
    for dtype in options.dtype or DTYPES:
        model = load_model(options.model, resolve_dtype(dtype), torch.device("cpu"))
        # every response ends at its length
        model.generation_config.eos_token_id = None
        for slots in options.slots or SLOTS[1:]:
            with vllm(model, slots) if VLLM in against and has_vllm() else nullcontext() as llm:
                for prompt, group in product(options.prompt or PROMPTS, options.group or GROUPS):
                    shape = shape_of(model, options.model.name, prompt, group)
                    shape = with_slots(shape, slots, _SEQUENCES_PER_SLOT_MODEL)
                    yield measure(shape, options.rounds, model, against, llm, warm_tokens=_WARM_TOKENS)


def measure_random(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure the random models."""
    against = options.against or CONTENDERS
    for shape, slots in product(SHAPES[: options.shapes], options.slots or SLOTS):
        model = make_model(shape)
        with vllm(model, slots) if VLLM in against and has_vllm() else nullcontext() as llm:
            yield measure(with_slots(shape, slots), options.rounds, model, against, llm)


def shape_of(model: PreTrainedModel, name: str, prompt: int, group: int) -> Shape:
    """Return the work of a model of one's own: groups of responses to prompts of ``prompt`` tokens."""
    config = model.config
    return replace(
        SHAPES[0], name=name, vocabulary=int(config.vocab_size), median=40.0, prompt_tokens=(prompt, prompt), group_size=group,
    )  # fmt: skip


def judge(result: dict[str, Any], bars: dict[str, float]) -> dict[str, Spread]:
    """Return the engine's speed over each bar's contender, round by round; for ``generate``, over the faster
    variant."""
    seconds: dict[str, list[float]] = result["seconds"]
    found: dict[str, Spread] = {}
    for name in bars:
        theirs = [taken for contender, taken in seconds.items() if contender.split(",")[0] == name]
        if theirs:
            found[name] = ratios(seconds[ENGINE], [min(turn) for turn in zip(*theirs, strict=True)])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if the engine misses a bar."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.engine",
        description="The local engine against generate and continuous batching of transformers, and vLLM, on a CPU.",
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds; the median counts")
    several: dict[str, Any] = {"action": "extend", "nargs": "+"}
    parser.add_argument("--slots", type=int, **several, help=f"slots of the engine (default: {SLOTS})")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="measure only the first N models", metavar="N")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--model", type=Path, help="measure this model folder instead of the random models")
    parser.add_argument("--dtype", **several, help=f"types of its weights (default: {DTYPES})")
    parser.add_argument("--prompt", type=int, **several, help=f"tokens of its prompts (default: {PROMPTS})")
    parser.add_argument("--group", type=int, **several, help=f"responses of a prompt (default: {GROUPS})")
    parser.add_argument("--against", choices=CONTENDERS, **several, help="(default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.update(VLLM_SETTINGS)
    is_random = options.model is None
    bars = BARS if is_random else BARS_MODEL
    results: list[dict[str, Any]] = []
    for result in measure_random(options) if is_random else measure_model(options):
        results.append(result)
        print(json.dumps(result), file=sys.stderr)
    show(
        f"Sampled tokens a processor second, one thread, {options.rounds} interleaved rounds",
        ("model", "slots", "prompt", "group", "contender", "tokens/s", "engine is faster"),
        [
            (
                f"{result['shape']} {result['dtype'].removeprefix('torch.')}",
                result["num_slots"],
                "-".join(map(str, dict.fromkeys(result["prompt_tokens"]))),
                result["group_size"],
                name,
                result["num_tokens"] / Spread.of(taken).median,
                str(ratios(result["seconds"][ENGINE], taken)),
            )
            for result in results
            for name, taken in result["seconds"].items()
        ],
    )
    short: list[str] = []
    for result in results:
        for name, ratio in judge(result, bars).items():
            bar = GROUPED if name == VLLM and result["group_size"] > 1 else bars[name]
            if ratio.median < bar:
                dtype, prompt = result["dtype"].removeprefix("torch."), result["prompt_tokens"][1]
                cell = f"{dtype}, {result['num_slots']} slots, prompt {prompt}, groups of {result['group_size']}"
                short.append(f"{result['shape']} {cell}: {ratio} of {name}, bar {bar}")
    print("\n".join(["below the bar:", *short]) if short else "every bar holds")
    if not has_vllm():
        print("vLLM is not installed: make vllm builds an environment with it, .venv-vllm")
    if options.json is not None:
        told = provenance("engine", arguments, rounds=options.rounds, threads=1, seed=0)
        write_json(options.json, told | {"bars": bars, "results": results})
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(exit_code(main))
