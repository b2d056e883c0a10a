"""The gain and cost of ``algorithm.oversampling``, on the real ledger in virtual time.

    headrace bench oversampling --json ops/results/oversampling.json

Dynamic sampling drops groups without signal. Their credit comes back at once and admits others, so
an update is filled without over-sampling, too. Groups that are admitted beyond that may grow too
old. Here generators, scorers and learner are a clock and a queue of events. The ledger is
``MemoryLedger`` with ``pipeline.ledger.staleness`` behind it, so waits and drops are those of a
run. Lengths are log-normal, with a standard deviation of the logarithm of 1 and a cut at eight
medians. A prompt's chance of a right response is uniform in logit, so that about four groups in ten
have signal.

*Consumes* nothing. *Produces* a table, and JSON. *Waits for* nothing: the clock is a number."""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from ops.bench.table import provenance, show, write_json
from ops.ending import exit_code
from pipeline.ledger.memory.ledger import MemoryLedger
from pipeline.ledger.types import Claim, LedgerSpec, Unit
from pipeline.process.progress_bar import tracked
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import FinishReason, Prompt, RewardScore, Segment, TrajectoryChunk

GROUP_SIZE = 16
GROUPS_PER_UPDATE = 32
NUM_UPDATES = 40
WARM_UP = 5
"""Updates that are not measured: sampling begins with nothing in flight."""
MEDIAN_S = 1.0
"""Time of the median response, the unit of all other times. The cap is eight times that."""
LOGIT_WIDTH = 7.0
"""Prompts' logits of being answered right lie between minus and plus this."""

_GENERATOR = Incarnation(Role.GENERATOR, "generator-0", 1)
_SCORER = Incarnation(Role.REWARD, "reward-0", 1)
_LEARNER = Incarnation(Role.LEARNER, "learner-0", 1)


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that vary."""

    oversampling: float
    eta: int
    num_slots: int
    """Responses sampled at once by all generators."""
    step_s: float
    """An update of the learner."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures over the measured updates."""

    update_s: float
    stale_share: float
    """Of the groups with signal, those dropped for their age."""
    sampled_per_trained: float
    """Responses sampled for one that is trained."""
    staleness: float
    """Mean age of the trained groups, in versions."""


COLUMNS = (
    "over-sampling", "eta", "slots", "learner's step", "an update", "stale, of those with signal",
    "sampled per trained", "staleness",
)  # fmt: skip


def settings() -> list[Setting]:
    """Return the compared fleets: a learner that waits for few slots, one that few slots wait for,
    and many slots."""
    batch = GROUP_SIZE * GROUPS_PER_UPDATE
    paces = ((batch // 4, 1.0), (batch // 4, 30.0), (2 * batch, 10.0))
    return [
        Setting(oversampling, eta, num_slots, step_s)
        for eta in (1, 2)
        for num_slots, step_s in paces
        for oversampling in (1.0, 1.5, 2.0, 3.0)
    ]


class _Simulation:
    """One run: a heap of future events, and the ledger."""

    def __init__(self, setting: Setting, seed: int, num_updates: int) -> None:
        self.setting = setting
        self.num_updates = num_updates
        self.seed = seed
        self.now = 0.0
        self.version = 0
        self.is_training = False
        self.idle_slots = setting.num_slots
        self.ledger = MemoryLedger(lambda _: 1, lambda: self.now)
        self.events: list[tuple[float, int, TrajectoryId | Claim]] = []
        self.order = itertools.count()
        self.begun: dict[TrajectoryId, int] = {}
        self.ended_s: list[float] = []
        self.ages: list[int] = []

    async def run(self) -> Result:
        setting = self.setting
        await self.ledger.open(
            LedgerSpec(
                run="oversampling",
                unit=Unit.GROUP,
                group_size=GROUP_SIZE,
                units_per_update=GROUP_SIZE * GROUPS_PER_UPDATE,
                eta=setting.eta,
                oversampling=setting.oversampling,
                signal_filter=True,
                lease_s=math.inf,
                scoring_deadline_s=math.inf,
            )
        )
        at_start: tuple[int, int] = (0, 0)
        while self.version < self.num_updates:
            await self._fill_slots()
            await self._begin_update()
            self.now, _, what = heapq.heappop(self.events)
            if isinstance(what, TrajectoryId):
                await self._finish(what)
            else:
                await self._end_update(what)
                if self.version == WARM_UP:
                    at_start = await self._dropped_and_sampled()
        stale, sampled = await self._dropped_and_sampled()
        trained = (self.num_updates - WARM_UP) * GROUPS_PER_UPDATE
        stale_groups = (stale - at_start[0]) / GROUP_SIZE
        return Result(
            update_s=(self.ended_s[-1] - self.ended_s[WARM_UP - 1]) / (self.num_updates - WARM_UP),
            stale_share=stale_groups / (stale_groups + trained),
            sampled_per_trained=(sampled - at_start[1]) / (trained * GROUP_SIZE),
            staleness=mean(self.ages[WARM_UP * GROUPS_PER_UPDATE :]),
        )

    async def _fill_slots(self) -> None:
        grant = await self.ledger.lease(_GENERATOR, max_trajectories=self.idle_slots, policy_version=self.version)
        for lease in grant.leases:
            self.begun[lease.trajectory] = self.version
            length = min(math.exp(self._dice("length", lease.trajectory).gauss(0.0, 1.0)), 8.0)
            self._at(self.now + MEDIAN_S * length, lease.trajectory)
        self.idle_slots -= len(grant.leases)

    async def _finish(self, trajectory: TrajectoryId) -> None:
        version = self.begun.pop(trajectory)
        tokens = np.zeros(1, np.int32)
        chunk = TrajectoryChunk(
            id=ChunkId(trajectory, 0),
            prompt=Prompt(prompt_id="p", tokens=tokens, text="", answer="", verifier=""),
            context_tokens=tokens[:0],
            tokens=tokens,
            behavior_logprobs=np.zeros(1, np.float32),
            segments=(Segment(version, 1),),
            finish_reason=FinishReason.STOP,
            response_text="",
        )
        self.idle_slots += 1
        await self.ledger.write_chunk(_GENERATOR, chunk)
        logit = self._dice("prompt", trajectory.group).uniform(-LOGIT_WIDTH, LOGIT_WIDTH)
        is_right = self._dice("right", trajectory).random() < 1.0 / (1.0 + math.exp(-logit))
        score = RewardScore(reward=1.0 if is_right else -1.0, accuracy=float(is_right))
        await self.ledger.write_score(_SCORER, chunk.id, score)

    async def _begin_update(self) -> None:
        if self.is_training:
            return
        claim = await self.ledger.claim(_LEARNER, policy_version=self.version)
        if isinstance(claim, Claim):
            self.is_training = True
            self.ages += [self.version - (self.ledger.state.record(int(name)).oldest or 0) for name in claim.units]
            self._at(self.now + self.setting.step_s, claim)

    async def _end_update(self, claim: Claim) -> None:
        self.is_training = False
        self.version += 1
        await self.ledger.advance(_LEARNER, self.version)
        await self.ledger.settle(_LEARNER, (claim.claim_id,), num_updates=self.version)
        self.ended_s.append(self.now)

    async def _dropped_and_sampled(self) -> tuple[int, int]:
        audit = await self.ledger.audit()
        return audit.trajectories.dropped.get("stale", 0), audit.tokens.admitted

    def _at(self, when: float, what: TrajectoryId | Claim) -> None:
        heapq.heappush(self.events, (when, next(self.order), what))

    def _dice(self, *what: object) -> random.Random:
        # the same draws for every setting
        return random.Random(f"{self.seed}:{what}")


def simulate(setting: Setting, seed: int, num_updates: int = NUM_UPDATES) -> Result:
    """Run so many updates, more than ``WARM_UP``, in virtual time."""
    return asyncio.run(_Simulation(setting, seed, num_updates).run())


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(
        prog="headrace bench oversampling", description="Gain and cost of algorithm.oversampling."
    )
    parser.add_argument("--seeds", type=int, default=3, help="of each setting (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    table: list[tuple[object, ...]] = []
    for setting in tracked(list(settings()), "over-sampling", "settings"):
        results = [simulate(setting, seed) for seed in range(options.seeds)]
        rows.append({"setting": asdict(setting), "results": [asdict(result) for result in results]})
        means = (mean(getattr(result, name) for result in results) for name in Result.__dataclass_fields__)
        table.append((*asdict(setting).values(), *means))
    show("Over-sampling, in medians of a response's time", COLUMNS, table)
    if options.json:
        found = provenance("oversampling", arguments, group_size=GROUP_SIZE, groups_per_update=GROUPS_PER_UPDATE)
        write_json(options.json, found | {"rows": rows})


if __name__ == "__main__":
    sys.exit(exit_code(main))
