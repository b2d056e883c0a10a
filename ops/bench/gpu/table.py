"""What is compared with what, held against its bar; and the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench.gpu.form import Form
from ops.bench.gpu.parts import Row
from ops.bench.gpu.runs import HELD_OUT_BAR, OWN_START, RUN_START
from ops.bench.table import markdown

ENGINE_BAR = 0.95
"""Least tokens a second of the engine over vLLM's own."""
MFU_BAR = 0.4
START_BAR = 1.15
_WORDS = {
    "seconds": "{:.2f} s", "first_s": "the first {:.1f} s", "tokens_per_s": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}",
    "peak_gib": "peak {:.1f} GiB", "micro_batch": "micro-batches of {:,.0f} tokens", "sequences": "{:.0f} sequences at once",
    "gib": "{:.2f} GiB", "max_difference": "max {:.1e} nats", "mean_difference": "mean {:.1e}", "kl": "KL {:.1e}",
    "updates": "{:.0f} updates", "an_update_s": "{:.2f} s each", "publish_s": "publishing {:.2f} s",
    "staleness": "staleness at most {:.0f}",
    "held_out_before": "held out {:.1%}", "held_out": "to {:.1%}", "reached_s": "half after {:.1f} s",
    "lost_workers": "{:.0f} workers lost",
}  # fmt: skip
_FLAGS = {
    "compiled": ("layers eager", "layers compiled"),
    "balances": ("THE LEDGER DOES NOT BALANCE", "the ledger balances"),
}


@dataclass(frozen=True, slots=True)
class Judged:
    """A comparison of what was measured."""

    what: str
    measured: str
    bar: str = ""
    holds: bool | None = None
    """None without a bar."""

    @property
    def verdict(self) -> str:
        return {None: "", True: "holds", False: "MISSED"}[self.holds]


def words(figures: Mapping[str, float]) -> str:
    """Return a row's figures as a reader wants them."""
    told = [
        _FLAGS[name][int(value)] if name in _FLAGS else _WORDS[name].format(value) for name, value in figures.items()
    ]
    return ", ".join(told)


def judge(form: Form, rows: Sequence[Row]) -> list[Judged]:
    """Return the comparisons for which everything was measured; bars for speed are for GPUs."""
    of = {row.what: row.figures for row in rows if row.figures}
    return [*_learning(form, of), *_sampling(form, of), *_runs(form, of)]


def _learning(form: Form, of: Mapping[str, Mapping[str, float]]) -> Iterator[Judged]:
    for shape in form.learned:
        ours = of.get(f"Headrace's learner, {shape.name}")
        if ours is None:
            continue
        least = MFU_BAR if form.on_gpu else None
        yield _at_least(f"learner, {shape.name}: MFU", ours["mfu"], least)
        for name in ("plain transformers loop", "the same loop compiled", "TRL's GRPO step"):
            if (theirs := of.get(f"{name}, {shape.name}")) is not None:
                ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
                yield _at_least(f"learner over {name}, {shape.name}: tokens/s", ratio, 1.0 if form.on_gpu else None)


def _sampling(form: Form, of: Mapping[str, Mapping[str, float]]) -> Iterator[Judged]:
    theirs = of.get("vLLM's offline generate")
    for what, bar in (("whole responses", ENGINE_BAR if form.on_gpu else None), ("windows of a quarter", None)):
        ours = of.get(f"Headrace's vllm engine, {what}")
        if ours and theirs:
            ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
            yield _at_least(f"engine over vLLM's offline generate, {what}: tokens/s", ratio, bar)


def _runs(form: Form, of: Mapping[str, Mapping[str, float]]) -> Iterator[Judged]:
    for when in ("first", "second"):
        ours, theirs = of.get(f"{RUN_START}, {when} start"), of.get(f"{OWN_START}, {when} start")
        if ours and theirs:
            ratio, what = ours["seconds"] / theirs["seconds"], f"from `headrace up` over vLLM's own, {when} start"
            holds = ratio <= START_BAR if form.on_gpu else None
            yield Judged(what, f"{ratio:.2f}", f"at most {START_BAR}" if form.on_gpu else "", holds)
    if run := of.get(f"DAPO, {form.num_updates} updates"):
        is_well = run["updates"] >= form.num_updates and not run["lost_workers"] and bool(run["balances"])
        told = words({name: run[name] for name in ("updates", "lost_workers", "balances")})
        yield Judged("DAPO, asynchronous", told, f"{form.num_updates} updates, none lost, balanced", is_well)
    if form.on_gpu and (run := of.get("SmolLM2-135M to 50 % held out")):
        yield _at_least("SmolLM2-135M, held out", run["held_out"], HELD_OUT_BAR)


def _at_least(what: str, value: float, bar: float | None) -> Judged:
    if bar is None:
        return Judged(what, f"{value:.1%}")
    return Judged(what, f"{value:.1%}", f"at least {bar:.0%}", value >= bar)


def section(command: str, told: Mapping[str, str], rows: Sequence[Row], judged: Sequence[Judged]) -> str:
    """Return a section of the page: conditions, rows, comparisons, and what was not measured."""
    measured = [(row.what, words(row.figures)) for row in rows if row.figures]
    compared = [(one.what, one.measured, one.bar, one.verdict) for one in judged]
    absent = [f"- {row.what}: {row.reason}" for row in rows if row.reason]
    return "\n".join(
        [
            f"## On {told['device']}, {told['date']}", "", f"    {command}", "",
            ", ".join(f"{name} {value}" for name, value in told.items() if name not in ("device", "date")) + ".", "",
            markdown(("what", "measured"), measured, num_left=2), "",
            markdown(("compared", "measured", "bar", ""), compared, num_left=4), "",
            "Not measured:" if absent else "Everything was measured.", "", *absent, "",
        ]
    )  # fmt: skip


def write_page(page: Path, text: str) -> None:
    """Put a section in the place of the page's one for the same device, or at its end."""
    before = page.read_text(encoding="utf-8") if page.is_file() else "# GPU check\n"
    device = text.partition(",")[0]
    kept = [part for part in re.split(r"^(?=## )", before, flags=re.MULTILINE) if part.partition(",")[0] != device]
    page.write_text("".join(kept).rstrip() + "\n\n" + text.rstrip() + "\n", encoding="utf-8")
