# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The cost of Headrace's engine over vLLM itself: tokens a second of the same prompts, in this process, on this CPU.

All contenders run in the same vLLM engine with the same weights and limits. Each prompt has one response length,
and no token ends a response. *offline* works like ``LLM.generate``: all requests enter, steps run until all are
finished, and there are no log-probs. *offline, log-probs* requests the sampled token's log-prob from vLLM, as
training needs it. *engine* is ``VllmEngine`` with windows, segments, log-probs and a random stream for each
trajectory, each response in one window. *engine, windows* cuts responses into windows of a quarter of the longest,
as T-PPO does. The bar is for *engine* over *offline*, the fastest.

Seconds are this process's processor seconds. One thread computes everything, so another process on the machine
stretches only the wall clock.

    python -m ops.bench.vllm_overhead --json bench-results/vllm_overhead.json      (in the environment of `make vllm`)
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.bench.sampling_work import SHAPES, VLLM_SETTINGS, Shape, Work, make_model, make_work, run_engine
from ops.bench.table import interleaved_medians, show, write_json
from ops.ending import exit_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from workers.engines.generation.vllm.in_process import InProcessCore

BAR = 0.9
"""Least tokens a second of the engine over vLLM's own."""


def run_offline(llm: Any, work: Work, turn: int, *, logprobs: int | None) -> int:
    """Sample with vLLM's engine as ``LLM.generate`` drives it; return the number of response tokens."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    for number, (prompt, length) in enumerate(zip(work.prompts, work.lengths.tolist(), strict=True)):
        params = VllmParams(
            temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        llm.add_request(f"offline-{turn}-{number}", {"prompt_token_ids": prompt.tolist()}, params)
    total = 0
    while llm.has_unfinished_requests():
        total += sum(len(output.outputs[0].token_ids) for output in llm.step())
    return total


def prepare(model: PreTrainedModel, folder: Path, num_slots: int) -> InProcessCore:
    """Start vLLM in this process on a model's weights, which are saved to ``folder``."""
    from workers.engines.generation.vllm.arguments import engine_arguments
    from workers.engines.generation.vllm.in_process import InProcessCore

    model.save_pretrained(folder)
    positions = int(model.config.max_position_embeddings)
    arguments = engine_arguments(folder, num_slots=num_slots, positions=positions, dtype="float32", on_cpu=True)
    return InProcessCore(arguments | {"max_num_seqs": num_slots})


def measure(shape: Shape, rounds: int, folder: Path) -> dict[str, Any]:
    from workers.engines.generation.vllm.engine import VllmEngine
    from workers.engines.model.loading import model_state

    model, work = make_model(shape), make_work(shape)
    core = prepare(model, folder, shape.num_slots)
    positions = int(model.config.max_position_embeddings)
    engine = VllmEngine(
        core, model_state(model.config), num_slots=shape.num_slots, vocabulary=shape.vocabulary, positions=positions
    )
    engine.load_weights(dict(model.named_parameters()), 0)
    num_tokens = int(work.lengths.sum())
    longest = int(work.lengths.max())
    turn = 0

    def contender(run: Any) -> Any:
        def timed() -> None:
            nonlocal turn
            turn += 1
            assert run(turn) == num_tokens

        return timed

    seconds = interleaved_medians(
        {
            "offline": contender(lambda n: run_offline(core.llm, work, n, logprobs=None)),
            "offline, log-probs": contender(lambda n: run_offline(core.llm, work, n, logprobs=0)),
            "engine": contender(lambda n: run_engine(engine, work, n, longest)),
            "engine, windows": contender(lambda n: run_engine(engine, work, n, -(-longest // 4))),
        },
        rounds=rounds,
        clock=time.process_time,
    )
    speeds = {name: num_tokens / value for name, value in seconds.items()}
    return {
        "shape": shape.name,
        "num_sequences": shape.num_sequences,
        "num_slots": shape.num_slots,
        "num_tokens": num_tokens,
        "tokens_per_s": speeds,
        "ratio": speeds["engine"] / speeds["offline"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if the engine misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the median counts")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="measure only the first N shapes", metavar="N")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    os.environ.update(VLLM_SETTINGS)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, shape in enumerate(SHAPES[: options.shapes]):
            results.append(measure(shape, options.rounds, Path(folder) / str(number)))
    show(
        f"sampled tokens a processor second with vLLM, one thread, median of {options.rounds} interleaved rounds",
        ("shape", "contender", "tokens/s", "of vLLM's own"),
        [
            (result["shape"], name, speed, f"{100 * speed / result['tokens_per_s']['offline']:.0f} %")
            for result in results
            for name, speed in result["tokens_per_s"].items()
        ],
    )
    if options.json is not None:
        write_json(options.json, {"bar": BAR, "results": results})
    return 0 if all(result["ratio"] >= BAR for result in results) else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
