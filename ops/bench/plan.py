"""Predictions of a plan beside what others have published of their runs: their devices, split, batch and lengths, our formulas.

    python -m ops.bench plan --json ops/results/plan.json [--run runs/demo-planned ...]

A row is predicted at the published split of devices between generation and learning; how the learner is split inside its
devices is ours, the fastest that fits. Then two kinds of devices against one for the same money, and finished runs of
this machine against the plans that they were started with."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ops.bench.table import provenance, show, write_json
from pipeline.config.schema import RunConfig
from pipeline.plan.devices import known_devices, read_devices
from pipeline.plan.planner import BestFirst, Group, candidates, fleets, make_plans
from pipeline.plan.profile import profile_run
from pipeline.plan.roles import Roles
from pipeline.plan.transformer import transformer
from pipeline.plan.workload import Lengths, workload

_NEMO: Final = "NVIDIA-NeMo/RL docs/about/performance-summary.md at 06beed91, and its recipes"
_VERL: Final = "verl-project/verl docs/advance/fully_async.md; mean length assumed: 1,500"
_DAPO: Final = "dapo-sia.github.io, where no time is given; mean length assumed: 4,000"
_AREAL: Final = "AReaL blog v0.3, 8,192 responses; mean length of its v0.2 log, split of its benchmark"

_NO_BOUND: Final = 64
"""Staleness of runs whose learner never waits for a long response, as ours does at its bound."""


def _model(
    kind: str, layers: int, hidden: int, inner: int, heads: int, keys: int, words: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": words, **more,
    }  # fmt: skip


MODELS: Final = {
    "Llama 3.1 8B": _model("llama", 32, 4096, 14336, 32, 8, 128256),
    "Qwen3 32B": _model("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
    "Qwen3 30B-A3B": _model(
        "qwen3_moe",
        48,
        2048,
        6144,
        32,
        4,
        151936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "Qwen2.5 Math 7B": _model("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "Qwen2.5 32B": _model("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "R1 Qwen 1.5B": _model("qwen2", 28, 1536, 8960, 12, 2, 151936),
    "R1 Qwen 7B": _model("qwen2", 28, 3584, 18944, 28, 4, 152064),
}


@dataclass(frozen=True)
class Published:
    """A run that others have described."""

    source: str
    model: str
    device: str
    generators: int
    """Devices; 0 if all of them generate and learn in turns."""
    learners: int
    tensor: int
    prompts: int
    group: int
    steps: int
    prompt: float
    response: float
    longest: int
    seconds: float | None
    """An update; None if it is not public."""
    staleness: int = 1
    reference: bool = False
    trained: float = 1.0


ROWS: Final = (
    Published(_NEMO, "Llama 3.1 8B", "H100", 0, 16, 1, 64, 32, 4, 110, 950, 4096, 97.7, 0, True),
    Published(_NEMO, "Llama 3.1 8B", "H100", 8, 8, 1, 64, 32, 4, 110, 1019, 4096, 74.6, 1, True),
    Published(_NEMO, "Qwen3 32B", "H100", 0, 32, 4, 64, 32, 4, 110, 3096, 4096, 393, 0, True),
    Published(_NEMO, "Qwen3 32B", "H100", 32, 32, 4, 64, 32, 4, 110, 3097, 4096, 215, 1, True),
    Published(_NEMO, "Qwen3 30B-A3B", "H100", 0, 32, 4, 64, 32, 4, 110, 3044, 4096, 225, 0, True),
    Published(_NEMO, "Qwen3 30B-A3B", "H100", 16, 16, 2, 64, 32, 4, 110, 3048, 4096, 244, 1, True),
    Published(_VERL, "Qwen2.5 Math 7B", "H20", 0, 32, 1, 512, 16, 16, 150, 1500, 28672, 790.1, 0),
    Published(_VERL, "Qwen2.5 Math 7B", "H20", 16, 16, 1, 512, 16, 16, 150, 1500, 28672, 294.77, _NO_BOUND),
    Published(_VERL, "Qwen2.5 Math 7B", "H20", 32, 32, 1, 512, 16, 16, 150, 1500, 28672, 189.26, _NO_BOUND),
    Published(_VERL, "Qwen2.5 Math 7B", "H20", 64, 64, 1, 512, 16, 16, 150, 1500, 28672, 150.63, _NO_BOUND),
    Published(_AREAL, "R1 Qwen 1.5B", "H800", 96, 32, 1, 512, 16, 4, 106, 7800, 27648, 53.3, _NO_BOUND),
    Published(_AREAL, "R1 Qwen 7B", "H800", 144, 48, 1, 512, 16, 4, 106, 7800, 27648, 91.4, _NO_BOUND),
    Published(_DAPO, "Qwen2.5 32B", "H20", 0, 128, 4, 512, 16, 16, 150, 4000, 20480, None, 0, False, 0.5),
)  # fmt: skip


def predicted(row: Published) -> tuple[float, dict[str, float], str]:
    """Return the seconds of an update, those of each role, and the learner's split."""
    sizes = {"groups_per_update": row.prompts, "group_size": row.group, "num_minibatches": row.steps}
    generation = {"engine": "vllm", "max_response_tokens": row.longest, "window_tokens": row.longest}
    config = RunConfig.model_validate(
        {
            "model": {"path": "m", "dtype": "bfloat16"},
            "data": {"train": ["d"]},
            "algorithm": {"name": "grpo", **sizes},
            "generation": generation,
            "staleness": {"eta": row.staleness},
        }
    )
    lengths = Lengths(prompt_tokens=row.prompt, response_tokens=row.response, trained_share=row.trained)
    roles = Roles(config, transformer(MODELS[row.model]), workload(config, lengths))
    device = known_devices()[row.device]
    # in turns, each has all devices and their memory: what is not its turn is moved to the host
    groups = (
        Group(("generator",), ((row.generators or row.learners, device),)),
        Group(("learner",), ((row.learners, device),)),
    )
    found = [e for e in fleets(roles, groups) if e.engines[0].tensor == row.tensor and e.staleness == row.staleness]
    if not found:
        raise ValueError(f"{row.model} on {row.learners} {row.device} does not fit")
    if row.reference:
        # the learner's devices compute it, in turns; our workers would each hold the whole model
        scored_s = roles.scored_s(device, row.learners, roles.work)
        found = [replace(e, seconds={**e.seconds, "learner": e.seconds["learner"] + scored_s}) for e in found]
    placed = next(BestFirst(found, 60.0).placed())
    return placed.period_s, dict(placed.candidate.seconds), placed.candidate.learner.split.in_words()


MIXED: Final = (
    ("R1 Qwen 1.5B", 4096, 1500.0, ("8xB200", "16xL4"), 9.0),
    ("R1 Qwen 7B", 16384, 6000.0, ("8xA100", "8xH100"), 9.0),
    ("R1 Qwen 7B", 4096, 1500.0, ("8xH200", "8xH100"), 20.0),
)
"""Model, longest and mean response, most devices of each kind, euros an hour."""


def mixed(model: str, longest: int, mean: float, kinds: tuple[str, str], euros: float) -> dict[str, Any]:
    """Return the seconds of an update on each kind alone and on both, for the same money."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "m", "dtype": "bfloat16"},
            "data": {"train": ["d"]},
            "algorithm": {"groups_per_update": 64},
            "generation": {"engine": "vllm", "max_response_tokens": longest},
        }
    )
    roles = Roles(config, transformer(MODELS[model]), workload(config, Lengths(response_tokens=mean)))
    best = {
        words: make_plans(candidates(roles, read_devices(words), euros), 60.0, num_others=0).best
        for words in (*kinds, ",".join(kinds))
    }
    seconds = {words: placed.period_s for words, placed in best.items()}
    both = best[",".join(kinds)]
    groups = {" and ".join(g.roles): [f"{n} {d.name}" for n, d in g.devices] for g in both.candidate.groups}
    gain = min(seconds[kind] for kind in kinds) / both.period_s
    return {
        "model": model,
        "longest": longest,
        "mean": mean,
        "euros": euros,
        "seconds": seconds,
        "both": groups,
        "gain": gain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", type=Path, action="append", default=[], help="a run that a plan's files started")
    options = parser.parse_args()
    rows, records = list[list[str]](), list[dict[str, Any]]()
    for row in ROWS:
        seconds, by_role, split = predicted(row)
        off = None if row.seconds is None else seconds / row.seconds - 1
        records.append({**asdict(row), "predicted_s": seconds, "by_role_s": by_role, "split": split, "error": off})
        place = f"{row.generators} + {row.learners}" if row.generators else f"{row.learners} in turns"
        reported = "-" if row.seconds is None else f"{row.seconds:g}"
        error = "-" if off is None else f"{off:+.0%}"
        parts = f"{by_role['generator']:.0f}, {by_role['learner']:.0f}"
        rows.append([row.model, f"{place} {row.device}", reported, f"{seconds:.0f}", error, parts])
    show(
        "an update, published and predicted",
        ["model", "devices", "reported s", "predicted s", "error", "generate, learn s"],
        rows,
    )
    both = [mixed(*case) for case in MIXED]
    table = [[c["model"], c["euros"], *c["seconds"].values(), f"{c['gain']:.2f}", str(c["both"])] for c in both]
    show(
        "two kinds for the same money", ["model", "EUR/h", "first s", "second s", "both s", "gain", "both have"], table
    )
    runs = [(folder.name, profile_run(folder)) for folder in options.run]
    mine = [
        {"run": name, "planned_s": found.planned_update_s, "measured_s": found.update_s, "updates": found.num_updates}
        for name, found in runs
    ]
    show("this machine", ["run", "planned s", "measured s", "updates"], [list(each.values()) for each in mine])
    if options.json is not None:
        write_json(options.json, provenance("plan", None) | {"rows": records, "mixed": both, "runs": mine})


if __name__ == "__main__":
    main()
