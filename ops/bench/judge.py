"""Cost of a slow judge for the generators: runs with one behind HTTP, and runs without one.

    python -m ops.bench.judge --json bench-results/judge.json

The real control plane around emulated engines, with the draws of ``configs/overlap.toml``. The
judge is an OpenAI-compatible server on loopback. It takes two seconds for each of at most 64
requests at once, which is 32 responses a second; the generators sample about 28. Both contenders
take turns within a round, on the same seed.

*Consumes* nothing but this project. *Produces* a table, JSON, and exit code 1 when the bar does not
hold. *Waits for* the runs, each within a limit."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ops.bench.fleet_run import last_counters
from ops.bench.overlap.measure import run_fleet
from ops.bench.table import Spread, provenance, show, write_json
from ops.ending import exit_code
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_history
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError

BAR = 0.95
"""Least tokens a second of the generators with a judge, over those without."""
LATENCY_S = 2.0
IN_FLIGHT = 64
_WARMUP_UPDATES = 4
FLEET = (
    "fleet.generator=3",
    "generation.num_slots=10",
    "generation.window_tokens=128",
    "staleness.eta=4",
    "emulation.step_s=0.5",
    "data.verifier=arithmetic",
)


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """The figures of one run, warm-up left out."""

    seed: int
    tokens_per_s: float
    """Response tokens that were trained on; nothing else is sampled for long in a steady state."""
    responses_per_s: float
    staleness_max: int
    num_judged: float
    """Requests to the judge in the whole run; 0 without one."""
    request_s: float
    """Mean seconds of a request."""
    num_failed: float


class _JudgeHandler(BaseHTTPRequestHandler):
    """Answers every request by the same score, after the latency."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Judge a response."""
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(LATENCY_S)
        data = json.dumps({"choices": [{"message": {"content": "Score: 5"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Answer the check before the run."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Print nothing."""


class _JudgeServer(ThreadingHTTPServer):
    request_queue_size = 2 * IN_FLIGHT
    daemon_threads = True


@contextmanager
def judge_server() -> Iterator[str]:
    """Serve the judge in threads of this process; yield its address."""
    server = _JudgeServer(("127.0.0.1", 0), _JudgeHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def measure(work: Path, url: str | None, *, seed: int, num_updates: int) -> JudgedRun:
    """Run the fleet once, with the judge at ``url`` or without one. Raises DataError when the run
    fails."""
    overrides = [*FLEET, *(() if url is None else with_judge(url))]
    name = "alone" if url is None else "judged"
    config = run_fleet(overrides, name, work, seed=seed, num_updates=num_updates)
    rows = [row for row in read_history(config.run_dir / HISTORY_NAME) if isinstance(row, UpdateRow)]
    steady = rows[_WARMUP_UPDATES:]
    steady_s = steady[-1].at_s - rows[_WARMUP_UPDATES - 1].at_s
    (counters,) = last_counters(config.run_dir, "reward")
    num_judged = counters.get("judge:requests", 0.0)
    if url is not None and not num_judged:
        raise DataError(f"the judge got no request; see the reward worker's log in {config.run_dir}")
    batch = config.algorithm.groups_per_update * config.algorithm.group_size
    report = json.loads((config.run_dir / "report.json").read_text(encoding="utf-8"))
    return JudgedRun(
        seed=seed,
        tokens_per_s=sum(row.num_response_tokens for row in steady) / steady_s,
        responses_per_s=batch * len(steady) / steady_s,
        staleness_max=int(report["max_staleness"]),
        num_judged=num_judged,
        request_s=counters.get("judge:request_s", 0.0) / max(1.0, num_judged),
        num_failed=counters.get("judge:failed", 0.0),
    )


def with_judge(url: str) -> tuple[str, ...]:
    """Return the settings of a run whose accuracy is the judge's number."""
    endpoint = f'url="{url}", model="judge", max_in_flight={IN_FLIGHT}'
    return (f"reward.endpoints.judge={{{endpoint}}}", "data.verifier=endpoint/judge")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when the bar does not hold."""
    parser = argparse.ArgumentParser(
        prog="headrace bench judge", description="Generators with a judge of two seconds, against none."
    )
    parser.add_argument("--rounds", type=int, default=3, help="each with a seed of its own (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=16, help="of a run (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/judge"), help="runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    runs: dict[str, list[JudgedRun]] = {"without a judge": [], "with a judge": []}
    with judge_server() as url:
        for seed in tracked(range(options.rounds), "judge", "rounds"):
            # those that went first go second in the next round
            for name, at in sorted({"without a judge": None, "with a judge": url}.items(), reverse=seed % 2 == 0):
                runs[name].append(measure(options.work, at, seed=seed, num_updates=options.updates))
                print(f"{name}, seed {seed}: {runs[name][-1].tokens_per_s:,.0f} tokens/s", flush=True)
    show(
        f"a judge of {LATENCY_S:g} s with {IN_FLIGHT} requests in flight",
        ("", "tokens/s", "responses/s", "staleness", "requests", "s/request", "failed"),
        [
            (
                name,
                str(Spread.of([run.tokens_per_s for run in of])),
                str(Spread.of([run.responses_per_s for run in of])),
                max(run.staleness_max for run in of),
                sum(run.num_judged for run in of),
                Spread.of([run.request_s for run in of]).median,
                sum(run.num_failed for run in of),
            )
            for name, of in runs.items()
        ],
    )
    pairs = zip(runs["with a judge"], runs["without a judge"], strict=True)
    ratio = Spread.of([judged.tokens_per_s / alone.tokens_per_s for judged, alone in pairs])
    holds = ratio.median >= BAR
    print(f"with over without: {ratio}; at least {BAR}: {'holds' if holds else 'DOES NOT HOLD'}")
    if options.json:
        told = provenance("judge", arguments, updates=options.updates, rounds=options.rounds, fleet=FLEET)
        figures = {"bar": BAR, "ratio": asdict(ratio), "latency_s": LATENCY_S, "in_flight": IN_FLIGHT}
        write_json(options.json, told | figures | {name: [asdict(run) for run in of] for name, of in runs.items()})
    return int(not holds)


if __name__ == "__main__":
    sys.exit(exit_code(main))
