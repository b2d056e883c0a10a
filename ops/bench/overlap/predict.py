"""The benchmark's runs, predicted: ``headrace simulate`` beside what was measured, on the same draws.

    python -m ops.bench.overlap && python -m ops.bench.overlap.predict --json ops/results/simulate.json

The emulated engines' times are their settings. What the control plane adds is measured once, over all runs together: the
learner's own work around its steps, and what a generator's step takes beyond its sleep. No row has costs of its own."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ops.bench.fleet_run import last_counters
from ops.bench.overlap.measure import WARMUP_UPDATES, name_of, run_overrides
from ops.bench.overlap.scenarios import CONFIG, SCENARIOS, Scenario, judge
from ops.bench.table import provenance, write_json
from ops.emulated.build import token_law
from ops.emulated.simulated import costs, responses
from ops.ending import exit_code
from pipeline.config.load import load_config
from pipeline.data.end_tokens import model_ends, response_texts
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.plan.costs import Costs
from pipeline.plan.simulate.run import Responses, simulate
from pipeline.rewards.verifier import Response
from protocol.ids import TrajectoryId

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_BAR = 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.overlap.predict", description="Predicts the measured runs."
    )
    parser.add_argument(
        "--work", type=Path, default=Path("bench-results/overlap"), help="the runs (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    runs = [_Run(scenario, options.work, options.seed) for scenario in SCENARIOS]
    own_s, publish_s = (fmean(getattr(run, part) for run in runs) for part in ("own_s", "publish_s"))
    step_s = fmean(run.step_s for run in runs)
    rows = [run.compared(own_s, publish_s, step_s) for run in runs]
    added = {"learner_update_s": own_s, "learner_publish_s": publish_s, "decode_step_s": step_s}
    print(_section(rows, added))
    if options.json:
        write_json(
            options.json, provenance("overlap.predict", arguments, seed=options.seed) | {"added": added, "rows": rows}
        )


class _Run:
    """A measured run, and what its control plane took."""

    def __init__(self, scenario: Scenario, work: Path, seed: int) -> None:
        self.scenario = scenario
        folder = work / f"{name_of(scenario)}-{seed}"
        self._rows = [row for row in run_history(folder / HISTORY_NAME).read_strictly() if isinstance(row, UpdateRow)]
        overrides = run_overrides(scenario.overrides, name_of(scenario), work, seed=seed, num_updates=len(self._rows))
        self.config = load_config([CONFIG], overrides)
        self._steady = self._rows[WARMUP_UPDATES:]
        self.own_s = fmean(row.seconds - row.wait_s - row.step_s - row.publish_s for row in self._steady)
        self.publish_s = fmean(row.publish_s for row in self._steady)
        counters = list(last_counters(folder, "generator"))
        steps, tokens = (sum(one[name] for one in counters) for name in ("decode_steps", "sampled_tokens"))
        emulated = costs(self.config).generator
        slept_s = emulated.decode_base_s * steps + emulated.decode_sequence_s * tokens
        self.step_s = max(0.0, sum(one["decode_s"] for one in counters) - slept_s) / steps

    def compared(self, own_s: float, publish_s: float, step_s: float) -> dict[str, Any]:
        steady = self._steady
        span_s = steady[-1].at_s - self._rows[WARMUP_UPDATES - 1].at_s
        emulated = costs(self.config)
        measured: Costs = replace(
            emulated,
            learner=replace(emulated.learner, update_s=own_s, publish_s=publish_s),
            generator=replace(emulated.generator, decode_base_s=emulated.generator.decode_base_s + step_s),
        )
        drawn = _judged(self.config) if self.config.algorithm.dynamic_sampling else responses(self.config)
        began_s = time.perf_counter()
        found = simulate(self.config, measured, drawn, num_updates=len(self._rows), warm_up=WARMUP_UPDATES)
        return {
            "scenario": self.scenario.name,
            "update_s": span_s / len(steady),
            "predicted_update_s": found.update_s,
            "tokens_per_s": sum(row.num_response_tokens for row in steady) / span_s,
            "predicted_tokens_per_s": found.tokens_per_s,
            "staleness": fmean(row.staleness_mean for row in steady),
            "predicted_staleness": found.staleness_mean,
            "staleness_max": max(row.staleness_max for row in self._rows),
            "predicted_staleness_max": found.staleness_max,
            "wait_s": fmean(row.wait_s for row in steady),
            "predicted_wait_s": found.wait_s,
            "own_s": self.own_s,
            "step_s": self.step_s,
            "bottleneck": found.bottleneck,
            "simulated_in_s": time.perf_counter() - began_s,
        }


def _judged(config: RunConfig) -> Responses:
    """Return the run's draws with the verdicts of its verifier, which reads prompt and response."""
    tokenizer = load_text_tokenizer(config.model.path)
    source, law = PromptSource(config, tokenizer), token_law(config, tokenizer)
    ends, drawn, seed = model_ends(config.model.path, tokenizer), responses(config), config.run.seed
    most = config.generation.max_response_tokens

    def accuracy(name: TrajectoryId) -> float:
        length, prompt = drawn.length(name), source.at(name.group)
        tokens = law.tokens(seed, name, 0, min(length, most), length=length).tolist()
        text, _ = response_texts(tokens, tokenizer, ends)
        answer = Response(prompt_text=prompt.text, response_text=text, answer=prompt.answer, verifier=prompt.verifier)
        return judge([answer])[0]

    return Responses(drawn.length, accuracy, words=drawn.words)


def _error(row: dict[str, Any], name: str) -> float:
    measured, predicted = row[name], row[f"predicted_{name}"]
    return predicted / measured - 1.0 if measured else predicted


def _section(rows: list[dict[str, Any]], added: dict[str, float]) -> str:
    lines = [
        "## Beside real runs",
        "",
        "    python -m ops.bench.overlap && python -m ops.bench.overlap.predict --json ops/results/simulate.json",
        "",
        "The [overlap benchmark](core.md) again, and what `headrace simulate` says of each run: same draws, same settings,",
        f"{WARMUP_UPDATES} updates of warm-up. The engines' times are their settings. Measured over all rows together, and the",
        f"same in all: the learner's own work around a step, {added['learner_update_s']:.3f} s an update; publishing,",
        f"{added['learner_publish_s']:.3f} s; {1e3 * added['decode_step_s']:.2f} ms of a decode step beyond its sleep.",
        f"The bar is {_BAR:.0%} for tokens a second and for mean staleness.",
        "",
        "|  | s an update | simulated | tokens/s | simulated | error | staleness | simulated | error | simulated in, s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        errors = _error(row, "tokens_per_s"), _error(row, "staleness")
        marked = [f"{error:+.1%}" if abs(error) <= _BAR else f"**{error:+.1%}**" for error in errors]
        lines.append(
            f"| {row['scenario']} | {row['update_s']:.2f} | {row['predicted_update_s']:.2f} | {row['tokens_per_s']:,.0f} | "
            f"{row['predicted_tokens_per_s']:,.0f} | {marked[0]} | {row['staleness']:.3f} | {row['predicted_staleness']:.3f} | "
            f"{marked[1]} | {row['simulated_in_s']:.1f} |"
        )
    missed = [
        row["scenario"] for row in rows if max(abs(_error(row, "tokens_per_s")), abs(_error(row, "staleness"))) > _BAR
    ]
    lines += ["", f"**Does not hold:** {'; '.join(missed)}." if missed else "**Holds** in all rows."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_code(main))
