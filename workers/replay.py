"""``headrace run replay``: repeats a run's updates from its log, and compares the weights bit by
bit.

Reads a run's update log, its start model and the remaining checkpoints. The updates go through the
learner's own code (``workers.learner.policy_update``). The report names the first update whose
weights differ. Nothing in the run folder changes, and the run may continue in the meantime.

Scores, reference log-probs and values come from the log; only the learner's part is repeated. With
other settings (``--what-if``) the same data trains another policy; differences are then reported,
not treated as errors."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pipeline.config.import_path import own_sources
from pipeline.config.load import parse_config
from pipeline.ledger.types import Restart
from pipeline.ledger.version_history import VersionHistory
from pipeline.process.exit_codes import ExitCode, exit_code_of
from pipeline.process.progress_bar import ProgressBar, progress
from pipeline.training.checkpoints import list_checkpoints, read_checkpoint
from pipeline.training.spikes import StepLimits
from pipeline.training.update_log.folder import UPDATES_FOLDER, LoggedUpdate, read_log
from pipeline.training.update_log.plan import Leg, Plan, Source, UpdateSpan, make_plan, update_spans, version_of
from pipeline.training.update_log.records import Batch, Digests, Start
from protocol.errors import ConfigError, DataError, HeadraceError
from workers.engines.build import build_training_backend
from workers.engines.training.seam import TrainingBackend
from workers.learner.policy_update import PolicyUpdate

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

T = TypeVar("T")

_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class Remade:
    update: int
    policy_version: int
    num_samples: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    recorded_losses: tuple[float, ...] | None
    """None if the learner ended before the update was made."""
    recorded_grad_norms: tuple[float, ...] | None
    differing: tuple[str, ...]
    num_tensors: int


@dataclass(slots=True)
class Report:
    run: str
    num_logged: int
    num_unreachable: int
    remade: list[Remade] = field(default_factory=list[Remade])
    environment: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Differences of the environment, by name: (recorded with the updates, now)."""
    saved: str | None = None

    @property
    def num_equal(self) -> int:
        return sum(one.recorded_losses is not None and not one.differing for one in self.remade)

    @property
    def first_difference(self) -> Remade | None:
        return next((one for one in self.remade if one.differing), None)


@dataclass(frozen=True, slots=True)
class Request:
    run_dir: Path
    after: int | None = None
    """Start as late as possible at or before this version."""
    until: int | None = None
    what_if: tuple[str, ...] = ()
    """``section.key=value``, overriding the run's settings."""
    check: bool = True
    """Stop at the first difference."""
    out: Path | None = None
    """Save the final state here."""


class Replay:
    def __init__(self, request: Request, tell: Callable[[str], None]) -> None:
        self._request = request
        self._tell = tell
        self._checkpoints = request.run_dir / "checkpoints"

    async def run(self) -> Report:
        """Repeat the updates, and report how they came out.

        Raises DataError when the log or its start is missing or damaged, or the source of an
        objective has changed. Raises ConfigError for a bad ``what_if``, or updates made on several
        ranks."""
        segments = read_log(self._request.run_dir / UPDATES_FOLDER)
        plan = self._plan(update_spans(segments))
        report = Report(
            str(self._request.run_dir), sum(len(segment.updates) for segment in segments), len(plan.unreachable)
        )
        if not plan.legs:
            raise DataError(self._why_nothing(plan))
        if plan.unreachable:
            versions = sorted(version_of(update) for update in plan.unreachable)
            self._tell(
                f"{len(versions)} updates between versions {versions[0]} and {versions[-1]} cannot be repeated: the log and "
                "the checkpoints hold no state before them"
            )
        backend: TrainingBackend | None = None
        with tempfile.TemporaryDirectory(prefix="headrace-replay-") as scratch:
            num_updates = sum(leg.end - leg.begin for leg in plan.legs)
            with progress("repeating updates", total=num_updates, unit="updates") as bar:
                for leg in plan.legs:
                    # one model at a time in memory
                    backend = None
                    backend = await self._leg(leg, Path(scratch), report, bar)
                    if self._request.check and report.first_difference:
                        break
        if self._request.out is not None and backend is not None:
            _save(backend, self._request.out)
            report.saved = str(self._request.out)
        return report

    def _plan(self, found: list[UpdateSpan]) -> Plan:
        at_hand = {
            (int(checkpoint.state["policy_version"]), int(checkpoint.state["num_updates"])): checkpoint.path.name
            for checkpoint in list_checkpoints(self._checkpoints)
        }
        return make_plan(found, at_hand, after=self._request.after, until=self._request.until)

    def _why_nothing(self, plan: Plan) -> str:
        place = self._request.run_dir / UPDATES_FOLDER
        if plan.unreachable:
            return (
                f"{place}: none of the {len(plan.unreachable)} updates of the range can be repeated: the checkpoints before "
                "them are gone; choose later versions, or raise replay.keep_mb or checkpoint.keep in the next run"
            )
        return f"{place} holds no update in the range; leave out --from and --to to see what there is"

    async def _leg(self, leg: Leg, scratch: Path, report: Report, bar: ProgressBar) -> TrainingBackend:
        start = leg.span.start
        config = self._config_of(start, {})
        if config.learner.ranks > 1:
            alone = "--what-if learner.backend=torch " if config.learner.backend == "pipeline" else ""
            raise ConfigError(
                f"{start.learner} had {config.learner.ranks} ranks, but a replay is one process, which adds in another order: "
                f"add {alone}--what-if learner.ranks=1 --no-check to repeat its updates up to rounding"
            )
        self._check_sources(start, own_sources(dict(config.algorithm), config.algorithm.path), report)
        backend = build_training_backend(config)
        if leg.source is Source.REPLAYED:
            backend.load(scratch / leg.state.fingerprint.hex())
        elif leg.checkpoint is not None:
            backend.load(read_checkpoint(self._checkpoints / leg.checkpoint).path)
        if leg.begin == 0:
            backend.restore_random_state(start.random_state)
        place = leg.checkpoint or ("the start model" if leg.source is Source.START_MODEL else "its repeated start")
        self._tell(f"{start.learner} from {place}, version {leg.span.version(leg.begin)}")
        self._check_start(leg, backend, place)
        here = backend.environment()
        there = start.environment
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                report.environment[name] = (there.get(name, "unset"), here.get(name, "unset"))
        updates = PolicyUpdate(config, backend)
        history = VersionHistory(tuple(Restart(*restart) for restart in start.restarts))
        used: dict[str, str] = {}
        for position in range(leg.begin, leg.end + 1):
            if position in leg.kept:
                _save(backend, scratch / leg.span.states[position].fingerprint.hex())
            if position < leg.end:
                logged = leg.span.updates[position]
                if logged.batch.settings != used:
                    used = logged.batch.settings
                    updates.apply_settings(self._config_of(start, used))
                await self._make(logged, updates, history, backend.digests, report)
                bar.advance()
                if self._request.check and report.first_difference:
                    break
        return backend

    def _limits(self, batch: Batch) -> StepLimits | None:
        """Return the logged limits, or None if ``--what-if`` sets others."""
        if any(setting.startswith("learner.spike_factor") for setting in self._request.what_if):
            return None
        return StepLimits(batch.loss_limit, batch.grad_norm_limit)

    def _config_of(self, start: Start, changed: Mapping[str, str]) -> RunConfig:
        """Return the learner's settings at its start, with later changes and ``--what-if`` on top."""
        # numbers depend on the micro-batches and on how layers are computed, which the device chose
        made = start.environment
        form = [f"learner.compile={'true' if made.get('layers') == 'compiled' else 'false'}"]
        form += [f"learner.micro_batch_tokens={tokens}" for tokens in [made.get("micro_batch_tokens")] if tokens]
        given = [*form, *(f"{key}={value}" for key, value in changed.items())]
        return parse_config(start.config, f"the configuration of {start.learner}", [*given, *self._request.what_if])

    def _check_sources(self, start: Start, now: dict[str, str], report: Report) -> None:
        """Refuse, or only report, an objective whose source is not the one the run used."""
        # a module that is no longer imported does not count: its importer has changed, too
        changed = sorted(name for name in start.sources.keys() & now.keys() if start.sources[name] != now[name])
        if not changed:
            return
        found = f"{_names(changed)} of the run's objective changed since {start.learner} imported it"
        if self._request.check:
            digests = ", ".join(f"{name} {start.sources[name]}, is {now[name]}" for name in changed[:_MAX_NAMES])
            raise DataError(
                f"{found} (digest was: {digests}); restore the source, or add --no-check to repeat the updates with "
                f"the current code and see what differs"
            )
        self._tell(f"{found}: the updates are made with the current source")
        report.environment |= {f"source of {name}": (start.sources[name], now[name]) for name in changed}

    def _check_start(self, leg: Leg, backend: TrainingBackend, place: str) -> None:
        if not self._request.check or leg.source is Source.REPLAYED:
            return
        before = leg.span.updates[leg.begin - 1].outcome if leg.begin else None
        expected = before.digests if before else leg.span.start.digests
        if differing := _differing(expected, backend.digests()):
            raise DataError(
                f"{place} does not hold the weights of the update log: {_names(differing)} differ; restore the "
                f"weights that the run began with, or replay from another version"
            )

    async def _make(
        self,
        logged: LoggedUpdate,
        updates: PolicyUpdate,
        history: VersionHistory,
        digest: Callable[[], Digests],
        report: Report,
    ) -> None:
        batch, outcome = logged.batch, logged.outcome
        try:
            prepared = updates.prepare(logged.units())
            stepped = await updates.step(
                prepared.samples,
                policy_version=batch.policy_version,
                history=history,
                compute=_at_once,
                limits=self._limits(batch),
            )
        except HeadraceError as error:
            if outcome is not None:
                raise
            self._tell(f"version {version_of(logged)}: was never made; now: {error}")
            return
        digests = digest()
        refused = tuple(one.unit for one in prepared.refused)
        differing: tuple[str, ...] = ()
        if outcome is not None:
            differing = tuple(_differing(outcome.digests, digests))
            if refused != outcome.refused:
                differing += ("units refused",)
        remade = Remade(
            update=batch.update,
            policy_version=version_of(logged),
            num_samples=len(prepared.samples),
            losses=tuple(result.loss for result in stepped.results),
            grad_norms=tuple(result.grad_norm for result in stepped.results),
            recorded_losses=outcome.losses if outcome else None,
            recorded_grad_norms=outcome.grad_norms if outcome else None,
            differing=differing,
            num_tensors=len(digests),
        )
        report.remade.append(remade)
        self._tell(_line(remade))


def _save(backend: TrainingBackend, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    backend.snapshot()(folder)


async def _at_once(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def _differing(expected: Digests, got: Digests) -> list[str]:
    return sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))


def _names(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _mean(values: tuple[float, ...] | None) -> str:
    return f"{sum(values) / len(values):.6g}" if values else "none"


def _line(one: Remade) -> str:
    figures = f"loss {_mean(one.losses)}, gradient norm {_mean(one.grad_norms)}"
    if one.recorded_losses is None:
        return f"version {one.policy_version}: was never made; now: {figures}"
    if not one.differing:
        return f"version {one.policy_version}: the same, {figures}"
    was = f"loss {_mean(one.recorded_losses)}, gradient norm {_mean(one.recorded_grad_norms)}"
    return (
        f"version {one.policy_version}: differs in {len(one.differing)} of {one.num_tensors} tensors; {figures}; "
        f"recorded: {was}"
    )


def _conclude(report: Report, seconds: float, *, check: bool) -> str:
    lines: list[str] = []
    first = report.first_difference
    if first is not None and check:
        lines.append(f"version {first.policy_version} (update {first.update}) differs in {_names(first.differing)}")
    if (first is not None or not report.remade) and report.environment:
        told = "; ".join(f"{name} was {was}, is {now}" for name, (was, now) in sorted(report.environment.items()))
        lines.append(f"what differs from when it was made: {told}")
    num_made = sum(one.recorded_losses is not None for one in report.remade)
    lines.append(
        f"{report.num_equal} of {num_made} updates came out bit for bit as they were, in {seconds:.1f} s "
        f"({report.num_logged} in the log; {report.num_unreachable} of the range without a state to start from)"
    )
    if report.saved:
        lines.append(f"saved: {report.saved}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Replay; return the exit code, 1 for an update that differs although it must not."""
    parser = argparse.ArgumentParser(prog="headrace run replay", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--from", dest="after", type=int)
    parser.add_argument("--to", dest="until", type=int)
    parser.add_argument("--what-if", action="append", default=[])
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    request = Request(options.run_dir, options.after, options.until, tuple(options.what_if), options.check, options.out)

    def tell(line: str) -> None:
        if not options.json:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    started = time.monotonic()
    try:
        report = asyncio.run(Replay(request, tell).run())
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return exit_code_of(error)
    tell(_conclude(report, time.monotonic() - started, check=request.check))
    if options.json:
        first = report.first_difference
        told = {
            **msgspec.to_builtins(report),
            "num_equal": report.num_equal,
            "first_difference": msgspec.to_builtins(first) if first else None,
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told)).decode() + "\n")
    return ExitCode.FAILURE if request.check and report.first_difference else ExitCode.OK
