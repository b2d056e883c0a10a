"""How much memory the whole demo fleet holds: every worker, the ledger server and the supervisor.

    python -m ops.bench.fleet_memory --json bench-results/fleet_memory.json

*Consumes* the demo's configuration. *Produces* the largest resident sums over a short run, by
process. PSS counts a page that several processes share once in all; RSS counts it in each. The bar
is 4 GB of PSS. *Waits for* a few updates. Linux only."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ops.bench.table import show, write_json
from ops.ending import exit_code

BAR_MB = 4096
_POLL_S = 0.5
_LIMIT_S = 300.0


def main() -> None:
    """Run the demo for a few updates, watch it, print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-memory-") as folder:
        peak, by_process = _watch(_start(Path(folder), options.updates))
    rows = [(name, pss, rss) for name, (pss, rss) in sorted(by_process.items())]
    rows.append(("sum", peak[0], peak[1]))
    verdict = "under" if peak[0] < BAR_MB else "OVER"
    show(f"Memory of the demo fleet at its peak: {verdict} 4 GB", ["process", "PSS, MB", "RSS, MB"], rows)
    if options.json:
        figures = {name: {"pss_mb": pss, "rss_mb": rss} for name, pss, rss in rows}
        write_json(options.json, {"bar_mb": BAR_MB, "processes": figures})


def _start(folder: Path, num_updates: int) -> subprocess.Popen[bytes]:
    subprocess.run([sys.executable, "-m", "ops.demo.task", "--out", str(folder)], check=True, timeout=120)
    settings = [
        f"run.dir={folder}",
        f"run.num_updates={num_updates}",
        f"data.train=['{folder / 'train.jsonl'}']",
        f"data.evaluation=['{folder / 'heldout.jsonl'}']",
    ]
    command = [sys.executable, "-m", "pipeline.cli", "up", "configs/demo.toml", "--fleet", "configs/fleets/demo.toml"]
    return subprocess.Popen([*command, "--plain", *(word for setting in settings for word in ("--set", setting))])


def _watch(supervisor: subprocess.Popen[bytes]) -> tuple[tuple[float, float], dict[str, tuple[float, float]]]:
    """Return the largest sums, and each process's figures at that moment, in MB."""
    peak: tuple[float, float] = (0.0, 0.0)
    at_peak: dict[str, tuple[float, float]] = {}
    deadline = time.monotonic() + _LIMIT_S
    while supervisor.poll() is None:
        if time.monotonic() > deadline:
            supervisor.terminate()
            supervisor.wait(60)
            raise TimeoutError(f"the fleet did not finish within {_LIMIT_S:g} s")
        found = {_name(pid): memory for pid in _tree(supervisor.pid) if (memory := _memory(pid)) is not None}
        total = (sum(pss for pss, _ in found.values()), sum(rss for _, rss in found.values()))
        if total[0] > peak[0]:
            peak, at_peak = total, found
        time.sleep(_POLL_S)
    if supervisor.returncode != 0:
        raise RuntimeError(f"the fleet ended with exit code {supervisor.returncode}; see above")
    return peak, at_peak


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        # a process is the child of the thread that started it
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _memory(pid: int) -> tuple[float, float] | None:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        # it has ended
        return None
    found = dict(re.findall(r"^(Pss|Rss):\s+(\d+) kB", text, re.MULTILINE))
    return int(found["Pss"]) / 1024, int(found["Rss"]) / 1024


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"{pid} (ended)"
    if "--name" in words:
        return words[words.index("--name") + 1]
    if "pipeline.cli" in words:
        return "supervisor"
    return f"{Path(words[0]).name} ({pid})"


if __name__ == "__main__":
    sys.exit(exit_code(main))
