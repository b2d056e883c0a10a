"""Measure engines and learner on this machine's card, beside their rivals.

Each part runs in a process of its own, with a time limit, and its rows are printed and written when it ends. A part
that fails, is out of memory, or no longer fits into the time is a line with the reason. Without a GPU, tiny models run
on the CPU. The exit code is 1 if a part failed or a bar was missed.

    python -m ops.bench.gpu --page ops/results/gpu-check.md
    python -m ops.bench.gpu --parts learner rivals --shape 1.5B"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from ops.bench.gpu.form import describe, detect
from ops.bench.gpu.models import SHAPES
from ops.bench.gpu.parts import START_PARTS, Row, as_json, measure, measure_here, parts_of
from ops.bench.gpu.table import judge, section, words, write_page
from ops.bench.table import show
from ops.ending import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts, by name or its first word")
    parser.add_argument("--list", action="store_true", help="list the parts with their seconds")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts (default: %(default)g)")
    parser.add_argument(
        "--shape", choices=SHAPES, action="append", default=[], help="model of the learner's parts (again: several)"
    )
    parser.add_argument("--smollm2", type=Path, default=Path("runs/models/smollm2"), help="its folder (%(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("bench-results/gpu_check.jsonl"), help="file of the rows (%(default)s)"
    )
    parser.add_argument("--page", type=Path, help="Markdown page that gets a section about this card")
    # how a part's own process is called
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=600.0, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    form = dataclasses.replace(
        detect(options.shape), smollm2=options.smollm2, limit_s=options.limit, began_s=options.began
    )
    parts = parts_of(form)
    if options.part is not None:
        measure_here(next(part for part in (*parts, *START_PARTS) if part.name == options.part), form, options.json)
        return 0
    unknown = [name for name in options.parts or () if all(name not in _names(part.name) for part in parts)]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(part.name for part in parts)}")
    wanted = [part for part in parts if not options.parts or set(options.parts) & _names(part.name)]
    if options.list:
        print("\n".join(f"{part.name:<16}{part.seconds:4.0f} s" for part in wanted))
        return 0
    told = {"date": f"{datetime.date.today()}", **describe(form)}
    print(", ".join(f"{name} {value}" for name, value in told.items()), flush=True)
    rows: list[Row] = []
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with options.json.open("w", encoding="utf-8") as file:

        def on_row(row: Row) -> None:
            rows.append(row)
            file.write(as_json(row) + "\n")
            file.flush()
            print(f"{row.what}: {words(row.figures) or f'NOT MEASURED: {row.reason}'}", flush=True)

        own = [word for name in options.shape for word in ("--shape", name)] + ["--smollm2", str(options.smollm2)]
        measure(wanted, 60.0 * options.minutes, on_row, own)
    judged = judge(form, rows)
    title = "GPU check" if form.on_gpu else "GPU check on a CPU: tiny models, and no bars for speed"
    show(title, ("what", "measured", "bar", ""), [(one.what, one.measured, one.bar, one.verdict) for one in judged])
    print(f"rows: {options.json}")
    if options.page is not None:
        words_given = sys.argv[1:] if arguments is None else arguments
        write_page(options.page, section(" ".join(["python -m ops.bench.gpu", *words_given]), told, rows, judged))
        print(f"page: {options.page}")
    failed = any(row.what == row.part and not row.reason.startswith("not begun") for row in rows)
    return int(failed or any(one.holds is False for one in judged))


def _names(part: str) -> set[str]:
    return {part, part.partition("-")[0]}


if __name__ == "__main__":
    sys.exit(exit_code(main))
