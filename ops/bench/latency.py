"""Tools of 0.1 to 30 s: how busy generators stay, beside the best that the same draws allow, and with a barrier.

    python -m ops.bench latency --rounds 3 --json bench-results/latency.json

Real ledger, wire and environment worker around emulated engines. A trajectory has three turns; the tool takes a
log-normal time after each, drawn from what the model said. The barrier is turn by turn: no trajectory of a batch goes
on before the slowest tool of the batch has answered. *Use* is the tokens sampled in a second, of those that slots which
are always full would sample. What generators lose to storing and leasing turns shows with tools that answer at once."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import heapq
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any, Final

from ops.bench.overlap.measure import prepare_model, run_fleet
from ops.bench.table import provenance, show, write_json
from ops.emulated.build import length_law, token_law
from ops.emulated.settings import emulation_of
from ops.ending import exit_code
from pipeline.environments.contract import Step
from pipeline.observability.fleet_history import fleet_history
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.process.progress_bar import tracked
from protocol.ids import TrajectoryId

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

MEDIAN_S, SIGMA, LEAST_S, MOST_S = 1.5, 1.2, 0.1, 30.0
TURNS: Final = 3
_BATCH: Final = 32
_SAYS: Final = "0"
_OVERRIDES: Final = (
    "environment.path=ops.bench.latency:SlowTool",
    "environment.timeout_s=240",
    f"algorithm.groups_per_update={_BATCH}",
    "generation.num_slots=8",
    "generation.window_tokens=256",
    "generation.max_response_tokens=900",
    "engines.settings.median_tokens=48",
    "engines.settings.tail=0.5",
    "engines.settings.decode_base_s=25e-3",
    "engines.settings.decode_slot_s=0",
    "engines.settings.prefill_token_s=0",
    "engines.settings.step_s=1.0",
    "fleet.generator=2",
    "fleet.reference=0",
    "reference.always=false",
)
SCENARIOS: Final = {
    "turns on their own (eta 4)": (4, 17, ()),
    "tools that answer at once (eta 4)": (4, 17, ("environment.arguments={is_quick=true}",)),
    "a barrier after each turn (eta 0)": (0, 4, (f"environment.arguments={{barrier={_BATCH}}}",)),
}
"""Staleness, updates and further overrides. The first eta + 1 updates are warm-up."""


def latency_s(said: str) -> float:
    """Return the seconds that the tool takes for these words."""
    u = (int.from_bytes(hashlib.blake2b(said.encode(), digest_size=6).digest()) + 0.5) / 2.0**48
    return min(MOST_S, max(LEAST_S, MEDIAN_S * math.exp(SIGMA * NormalDist().inv_cdf(u))))


class SlowTool:
    _arrived: list[int] = [0] * TURNS
    _gates: list[asyncio.Event] = [asyncio.Event() for _ in range(TURNS)]  # noqa: RUF012

    def __init__(self, barrier: int = 0, *, is_quick: bool = False) -> None:
        """``barrier``: how many trajectories must have come as far before one goes on. ``is_quick``: it takes no time."""
        self._barrier, self._is_quick, self._turn = barrier, is_quick, 0

    def reset(self, row: dict[str, Any]) -> str:
        return "Go."

    async def step(self, message: dict[str, Any]) -> Step:
        await asyncio.sleep(0.0 if self._is_quick else latency_s(message["content"]))
        if self._barrier:
            await self._meet()
        self._turn += 1
        right = float(len(message["content"]) % 2)
        return Step(reward=right, accuracy=right, done=True) if self._turn == TURNS else Step(_SAYS)

    async def _meet(self) -> None:
        gate = self._gates[self._turn]
        self._arrived[self._turn] += 1
        if self._arrived[self._turn] == self._barrier:
            self._arrived[self._turn], self._gates[self._turn] = 0, asyncio.Event()
            gate.set()
        await gate.wait()


@dataclass(frozen=True, slots=True)
class Measured:
    scenario: str
    seed: int
    use: float
    ideal_use: float
    """Of the same draws with the same ``eta``, without a barrier."""
    update_s: float
    tokens_per_s: float


def measure(name: str, work: Path, seed: int) -> Measured:
    eta, num_updates, further = SCENARIOS[name]
    model = prepare_model(work / "tools_model", Path("ops/demo/tools_model"))
    overrides = (*_OVERRIDES, f"model.path={model}", f"staleness.eta={eta}", *further)
    config = run_fleet(overrides, f"latency-{list(SCENARIOS).index(name)}", work, seed=seed, num_updates=num_updates)
    rows = [row for row in run_history(config.run_dir / HISTORY_NAME).read_strictly() if isinstance(row, UpdateRow)]
    begin_s, end_s = rows[eta].at_s, rows[-1].at_s
    within = [row for row in fleet_history(config.run_dir).read_strictly() if begin_s <= row.at_s <= end_s]
    tokens = within[-1].num_tokens_generated - within[0].num_tokens_generated
    tokens_per_s = tokens / (within[-1].at_s - within[0].at_s)
    update_s = (end_s - begin_s) / (num_updates - eta - 1)
    return Measured(name, seed, tokens_per_s / _full(config), ideal_use(config), update_s, tokens_per_s)


def _full(config: RunConfig) -> float:
    """Return how many tokens a second slots sample that are always full."""
    return config.fleet.generator * config.generation.num_slots / emulation_of(config).decode_base_s


@dataclass(slots=True)
class _Playing:
    """A trajectory in the ideal run."""

    number: int
    """In order of admission."""
    turns: list[tuple[int, float]]
    age: int = -1
    """The version at which it began; -1 before."""


def ideal_use(config: RunConfig) -> float:
    """Play the run without any cost but decoding, tools and steps, by the run's own rules: credit admits trajectories in
    order, a free slot takes the first that is open, and the learner claims as `pipeline/ledger/staleness.md` says."""
    settings, batch, eta = emulation_of(config), config.algorithm.groups_per_update, config.staleness.eta
    num_free = config.fleet.generator * config.generation.num_slots
    trajectories = _trajectories(config)
    open_: list[tuple[int, _Playing]] = []
    running: dict[int, _Playing] = {}
    done: list[_Playing] = []
    events: list[tuple[float, int, str, _Playing | None]] = []
    order = itertools.count()
    now_s = begin_s = 0.0
    admitted = version = num_tokens = 0
    is_stepping = False

    def after(seconds: float, what: str, playing: _Playing | None = None) -> None:
        heapq.heappush(events, (now_s + seconds, next(order), what, playing))

    while version < config.run.num_updates:
        while admitted < (eta + 1 + version) * batch:
            heapq.heappush(open_, (admitted, _Playing(admitted, next(trajectories))))
            admitted += 1
        if not is_stepping and (claim := _claim(done, [*running.values()], version, batch, eta)):
            done = [one for one in done if one.number not in claim]
            is_stepping = True
            after(settings.step_s, "stepped")
        while open_ and num_free:
            _, playing = heapq.heappop(open_)
            playing.age = version if playing.age < 0 else playing.age
            running[playing.number] = playing
            num_free -= 1
            after(playing.turns[0][0] * settings.decode_base_s, "sampled", playing)
        now_s, _, what, playing = heapq.heappop(events)
        if playing is None:
            version, is_stepping = version + 1, False
            begin_s = now_s if version == eta + 1 else begin_s
        elif what == "sampled":
            num_free += 1
            size, latency = playing.turns.pop(0)
            num_tokens += size if version > eta else 0
            after(latency, "answered", playing)
        elif playing.turns:
            heapq.heappush(open_, (playing.number, playing))
        else:
            done = sorted([*done, running.pop(playing.number)], key=lambda one: one.number)
    return num_tokens / (now_s - begin_s) / _full(config)


def _claim(done: Sequence[_Playing], running: Sequence[_Playing], version: int, batch: int, eta: int) -> set[int]:
    """Return the numbers of the trajectories that the claim at ``version`` takes; none while it waits."""
    edge, chosen = version - eta, dict[int, None]()
    if len(done) < batch or any(one.age == edge for one in running):
        return set()
    for lag in range(eta):
        late = [one.number for one in done if edge <= one.age <= edge + lag]
        due = len(late) + sum(edge <= one.age <= edge + lag for one in running)
        urgent = min(due - lag * batch, batch)
        missing = max(0, urgent - len(chosen))
        chosen |= dict.fromkeys([number for number in late if number not in chosen][:missing])
        if len(chosen) < urgent:
            return set()
    rest = [one.number for one in done if one.number not in chosen]
    return {*chosen, *rest[: batch - len(chosen)]}


def _trajectories(config: RunConfig) -> Iterator[list[tuple[int, float]]]:
    """Yield each trajectory's turns, as tokens and the tool's seconds, in order of admission."""
    from pipeline.data.end_tokens import model_ends
    from pipeline.data.tokenizer import load_text_tokenizer
    from pipeline.environments.conversation import ChatFormat

    tokenizer, seed = load_text_tokenizer(config.model.path), config.run.seed
    chat = ChatFormat(tokenizer, model_ends(config.model.path, tokenizer), keep_thinking=False)
    lengths, words = length_law(emulation_of(config)), token_law(config, tokenizer)
    is_quick = bool(config.environment.arguments.get("is_quick"))
    spoken = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "1"}]
    given = chat.following(spoken, [{"role": "user", "content": _SAYS}], last_token=words.stop).tokens
    for group in range(1 << 30):
        trajectory, begin = TrajectoryId("t", group, 0), 0
        turns: list[tuple[int, float]] = []
        for _ in range(TURNS):
            end = lengths.end_after(seed, trajectory, begin)
            tokens = words.tokens(seed, trajectory, begin, end, length=end).tolist()
            turns.append((end - begin, 0.0 if is_quick else latency_s(chat.parse(tokens).message["content"])))
            begin = end + len(given)
        yield turns


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench latency", description="Slow tools, with and without a barrier."
    )
    parser.add_argument("--rounds", type=int, default=1, help="rounds, each with its own seed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/latency"), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    runs: list[Measured] = []
    for seed in tracked(range(options.seed, options.seed + options.rounds), "latency", "rounds"):
        for name in SCENARIOS:
            runs.append(measure(name, options.work, seed))
            print(runs[-1], flush=True)
    columns = ("", "use", "ideal", "share of ideal", "s/update", "tokens/s")
    rows: list[Sequence[object]] = []
    for name in SCENARIOS:
        of = [run for run in runs if run.scenario == name]
        figures = [(run.use, run.ideal_use, run.use / run.ideal_use, run.update_s, run.tokens_per_s) for run in of]
        rows.append((name, *(median(column) for column in zip(*figures, strict=True))))
    show(f"tools of {LEAST_S:g} to {MOST_S:g} s", columns, rows)
    if options.json:
        write_json(options.json, provenance("latency", arguments) | {"runs": [asdict(run) for run in runs]})


if __name__ == "__main__":
    sys.exit(exit_code(main))
