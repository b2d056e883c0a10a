"""Warns of settings that are allowed but seldom intended, for ``config check`` and ``headrace
doctor``.

Settings that contradict each other are refused by ``pipeline.config.schema``; those that no part of
a run reads are named by ``pipeline.config.unread``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from pipeline.config.learning import Importance, SampledSettings
from pipeline.config.schema import RunConfig
from pipeline.preflight.findings import CheckFinding, warn
from pipeline.preflight.memory_needs import is_cpu
from pipeline.runtime.machine import Machine
from pipeline.supervisor.fleet_size import desired_counts
from protocol.ids import Role

_BUSY: Final = 4
"""Computing threads per core above which they mostly wait for one another."""
_MOST_WINDOWS: Final = 64
_HEARTBEATS: Final = 3.0
"""How long heartbeats, which come every second, may be missing on a busy machine, in seconds."""


def lint(config: RunConfig, machine: Machine) -> list[CheckFinding]:
    """Return a warning for each combination that is allowed but seldom intended on this machine."""
    return [finding for rule in _RULES for finding in rule(config, machine)]


def threads_of(config: RunConfig) -> dict[Role, int]:
    """Return the torch threads of one worker of each role that computes on a CPU."""
    found: dict[Role, int] = {}
    if not config.learner.has_own_engine and is_cpu(config.model.device):
        found[Role.LEARNER] = config.learner.threads * config.learner.ranks
    if config.has_sampling and config.generation.engine == "local" and is_cpu(config.generation.device):
        found[Role.GENERATOR] = config.generation.threads
    if config.has_reference and config.reference.backend == "torch" and is_cpu(config.reference.device):
        found[Role.REFERENCE] = config.reference.threads
    if config.has_critic and not config.value.has_own_engine and is_cpu(config.value.device):
        found[Role.VALUE] = config.value.threads * config.value.ranks
    return found


def _threads(config: RunConfig, machine: Machine) -> Iterator[CheckFinding]:
    counts, cores, launched = desired_counts(config), machine.num_cores, config.launch.elsewhere
    here = {role: number for role, number in threads_of(config).items() if role not in launched and counts.get(role)}
    sections = {Role.GENERATOR: "generation"}
    for role, number in here.items():
        if number > cores:
            key = sections.get(role, str(role))
            yield warn(
                "threads",
                f"one {role} worker computes with {number} threads on {cores} cores",
                f"at most {cores}",
                f"lower {key}.threads" + (f" or {key}.ranks" if role in (Role.LEARNER, Role.VALUE) else ""),
            )
    together = sum(number * counts[role] for role, number in here.items())
    if together > _BUSY * cores:
        yield warn(
            "threads",
            f"all workers together compute with {together} threads on {cores} cores",
            f"at most {_BUSY} a core",
            "lower the numbers of [fleet] or the settings `threads`",
        )


def _slots(config: RunConfig, machine: Machine) -> Iterator[CheckFinding]:
    generation, algorithm = config.generation, config.algorithm
    slots = generation.num_slots * config.fleet.generator
    credit = (
        int((config.staleness.eta + 1) * algorithm.oversampling * algorithm.groups_per_update) * algorithm.group_size
    )
    if not generation.has_own_engine and not config.data.responses and slots > credit:
        yield warn(
            "slots",
            f"generators have {slots} slots, and credit admits {credit} responses at once, so slots stay empty",
            f"fleet.generator * generation.num_slots up to {credit}",
            "lower one of them, or raise staleness.eta or algorithm.groups_per_update",
        )


def _windows(config: RunConfig, machine: Machine) -> Iterator[CheckFinding]:
    windows = -(-config.generation.max_response_tokens // config.generation.window_tokens)
    if windows > _MOST_WINDOWS:
        yield warn(
            "windows",
            f"the longest response has {windows} windows, each stored with all tokens before it",
            f"at most {_MOST_WINDOWS}",
            "raise generation.window_tokens",
        )


def _deadlines(config: RunConfig, machine: Machine) -> Iterator[CheckFinding]:
    reward, ledger, supervisor = config.reward, config.ledger, config.supervisor
    judged = {"reward.timeout_s": reward.timeout_s}
    judged |= {f"reward.endpoints.{name}.timeout_s": one.timeout_s for name, one in reward.endpoints.items()}
    for key, seconds in judged.items():
        if seconds >= ledger.scoring_deadline_s:
            yield warn(
                "deadlines",
                f"{key} is {seconds:g} s, and an unscored chunk is handed out again after {ledger.scoring_deadline_s:g} s, "
                "so it would be judged twice",
                "less than ledger.scoring_deadline_s",
                f"lower {key}, or raise ledger.scoring_deadline_s",
            )
    beats = {"supervisor.silent_after_s": supervisor.silent_after_s, "ledger.lease_s": ledger.lease_s}
    for key, seconds in beats.items():
        if seconds < _HEARTBEATS:
            yield warn(
                "deadlines",
                f"{key} is {seconds:g} s, and heartbeats come every second, so a busy machine loses healthy workers",
                f"at least {_HEARTBEATS:g} s",
                f"raise {key}",
            )


def _correction(config: RunConfig, machine: Machine) -> Iterator[CheckFinding]:
    generation = config.generation
    differs = generation.engine == "vllm" or (
        generation.engine == "local" and config.types.generator != config.types.learner
    )
    algorithm = config.algorithm
    is_uncorrected = isinstance(algorithm, SampledSettings) and algorithm.importance is Importance.NONE
    if is_uncorrected and differs and not config.data.responses:
        engine = "vLLM" if generation.engine == "vllm" else f"the engine in {config.types.generator}"
        yield warn(
            "correction",
            f"{engine} computes log-probs that differ from the learner's, and algorithm.importance is none",
            "a correction for the difference",
            "set algorithm.importance to tis",
        )


def _warm_up(config: RunConfig, machine: Machine) -> Iterator[CheckFinding]:
    warm_up, updates = config.learner.warmup_updates, config.run.num_updates
    if 0 < updates <= warm_up:
        yield warn(
            "warm-up",
            f"learner.warmup_updates is {warm_up}, and the run has {updates} updates, so the rate stays below learning_rate",
            f"less than {updates}",
            "lower learner.warmup_updates, or raise run.num_updates",
        )


def _devices(config: RunConfig, machine: Machine) -> Iterator[CheckFinding]:
    settings = {"model.dtype": (config.types.learner, config.model.device)}
    if config.generation.engine == "local":
        settings["generation.dtype"] = (config.types.generator, config.generation.device)
    if config.learner.has_own_engine:
        return
    for key, (dtype, device) in settings.items():
        if dtype == "bfloat16" and is_cpu(device) and not machine.has_bfloat16:
            yield warn(
                "types",
                f"{key} is bfloat16, for which this processor has no instructions, so products take several times as long",
                "float32 here",
                f"set {key} to auto or float32",
            )
    if not is_cpu("auto"):
        named = {"model.device": config.model.device, "generation.device": config.generation.device}
        for key, device in named.items():
            if device == "cpu":
                yield warn("devices", f"{key} is cpu, and this machine has a GPU", "auto", f"set {key} to auto")


_RULES: Final[tuple[Callable[[RunConfig, Machine], Iterator[CheckFinding]], ...]] = (
    _threads, _slots, _windows, _deadlines, _correction, _warm_up, _devices,
)  # fmt: skip
