"""``python -m ops.checks.fuzz decoder|mailbox|peek|score``: hostile bytes, steered by coverage.

libFuzzer invents the inputs, through ``atheris``, which ``make fuzz`` installs into its own environment; it
gives each target ten minutes. The corpus begins with one message of each type. Prints executions, coverage and
peak memory as JSON. The first input that breaks a promise of ``ops.checks.fuzz_targets``, or takes more memory
than ``--rss-limit-mb`` or more than thirty seconds, is written to a file. The exit code is 0 if every promise
held."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TARGETS = ("decoder", "mailbox", "peek", "score")
_INSTRUMENTED = ["protocol", "pipeline.weights", "pipeline.rewards", "pipeline.data", "pipeline.cli.inspect"]
_GRACE_S = 60
_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")
_STATISTIC = re.compile(r"stat::(\w+):\s+(\d+)")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ops.checks.fuzz", description="Hostile bytes, steered by coverage."
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--rss-limit-mb", type=int, default=512)
    parser.add_argument(
        "--corpus", type=Path, help="folder of inputs worth keeping, and of crashes (default: a new one)"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _fuzz(options.target, options.corpus, options.seconds, options.rss_limit_mb)
        return 0
    folder = options.corpus or Path(tempfile.mkdtemp(prefix=f"headrace-fuzz-{options.target}-"))
    _write_corpus(folder, options.target)
    command = [sys.executable, "-m", "ops.checks.fuzz", options.target, "--child", "--corpus", str(folder)]
    command += ["--seconds", str(options.seconds), "--rss-limit-mb", str(options.rss_limit_mb)]
    log = folder.with_name(f"{folder.name}.log")
    with log.open("wb") as file:
        done = subprocess.run(command, stdout=file, stderr=file, timeout=options.seconds + _GRACE_S, check=False)
    print(json.dumps({"target": options.target, **_told(log), "exit_code": done.returncode, "log": str(log)}, indent=2))
    return done.returncode


def _fuzz(target: str, folder: Path, seconds: int, rss_limit_mb: int) -> None:
    """Run libFuzzer in this process, which it ends itself."""
    import importlib

    # not among the project's dependencies
    atheris = importlib.import_module("atheris")

    with atheris.instrument_imports(include=_INSTRUMENTED):
        import structlog

        from ops.checks.fuzz_targets import Mailboxes, Scoring, read_anything, show_anything

    structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
    promise = {
        "decoder": lambda: read_anything,
        "mailbox": lambda: Mailboxes().feed,
        "peek": lambda: show_anything,
        "score": lambda: Scoring().feed,
    }[target]()
    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={rss_limit_mb}", "-timeout=30", "-max_len=65536"]
    crashes = f"-artifact_prefix={folder}/crash-"
    atheris.Setup([sys.argv[0], str(folder), *limits, crashes, "-print_final_stats=1", "-len_control=20"], promise)
    atheris.Fuzz()


def _write_corpus(folder: Path, target: str) -> None:
    """Write good inputs of each kind, from which the fuzzer starts."""
    from ops.checks.fuzz_targets import good_inputs

    folder.mkdir(parents=True, exist_ok=True)
    for name, data in good_inputs(target).items():
        (folder / f"sample-{name}").write_bytes(data)


def _told(log: Path) -> dict[str, object]:
    """Return the figures that libFuzzer printed."""
    text = log.read_text(errors="replace")
    figures = {name: int(value) for name, value in _STATISTIC.findall(text)}
    covered = _COVERAGE.findall(text)
    return {
        "executions": figures.get("number_of_executed_units", 0),
        "executions_per_s": figures.get("average_exec_per_sec", 0),
        "coverage_edges": int(covered[-1][0]) if covered else 0,
        "coverage_features": int(covered[-1][1]) if covered else 0,
        "corpus": int(covered[-1][2]) if covered else 0,
        "peak_rss_mb": figures.get("peak_rss_mb", 0),
        "crash": text.partition("Traceback")[2][-2000:] if "Uncaught Python exception" in text else "",
    }


if __name__ == "__main__":
    sys.exit(main())
