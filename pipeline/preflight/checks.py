"""All checks of a configuration, for ``headrace config check``, ``headrace up`` and ``headrace
doctor``. The first two end with the first error, the last shows what all checks find.

*Consumes* a configuration. *Produces* findings (skipped prompts, counts), or one error with a
remedy. *Waits for* sandbox processes that import the verifiers' modules, and for a configured
ledger server, each with a deadline."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pipeline.config.cross_checks import BUILT_IN_ENVIRONMENTS, TOOLS
from pipeline.config.gpus import check_gpus
from pipeline.config.ledger_spec import ledger_spec
from pipeline.config.operations import REWARDS
from pipeline.config.rewards import EnvironmentSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import RewardModelSection
from pipeline.config.unread import in_words
from pipeline.data.guided_prompts import GuidedPrompts
from pipeline.data.prompt_form import conversation_tokens
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.environments.host import EpisodeCall
from pipeline.environments.processes import EnvironmentPool
from pipeline.files.code_copies import checked_code
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import external_url
from pipeline.ledger.server.promises import judge_terms, read_promises
from pipeline.ledger.types import LedgerSpec
from pipeline.ledger.url import hide_password, refuse_plaintext
from pipeline.preflight.cards import told_cards
from pipeline.preflight.engines import check_engines
from pipeline.preflight.findings import CheckFinding, fine, refuse, warn
from pipeline.preflight.guidance import check_guidance
from pipeline.preflight.ledger_size import check_ledger_size
from pipeline.preflight.lint import lint
from pipeline.preflight.memory_needs import is_cpu, judge, needs, room_here, shapes_of
from pipeline.preflight.model_folder import (
    check_reward_model,
    longest_context,
    longest_input,
    model_digest,
    read_model_config,
    value_source,
)
from pipeline.preflight.packages import check_lora, check_optimizer, check_ranks
from pipeline.preflight.prompts import check_prompts, check_stop_strings
from pipeline.preflight.sinks import check_sinks
from pipeline.preflight.vllm import AskedProcess, ask_vllm, check_vllm, check_vllm_reference
from pipeline.process.progress_bar import progress
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.registry import BY_MODEL
from pipeline.runtime.machine import this_machine
from pipeline.runtime.tracing import check_tracing
from pipeline.supervisor.fleet_size import check_fleet_size, desired_counts, most_counts
from protocol.endpoints import Endpoint
from protocol.errors import ConfigError, DataError, EnvironmentFailed, LedgerRefused, LedgerUnavailable
from protocol.hosts import advertised, numeric, wants_ipv6
from protocol.ids import Role

_ANSWER_S = 5.0
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Preflight:
    findings: tuple[str, ...]
    spec: LedgerSpec


def preflight(config: RunConfig, *, plain: bool = False, ask_vllm: AskedProcess | None = None) -> Preflight:
    """Check model, data, verifiers and addresses. ``plain`` shows progress as lines, even on a
    terminal. ``ask_vllm`` asks a process that has imported vLLM. Raises ConfigError or DataError for a
    setting or a file that would make the run fail, LedgerUnavailable if the server does not answer."""
    subject = _Subject(config, ask_running=ask_vllm)
    findings: list[str] = []
    with progress("checking", total=len(CHECKS), unit="checks", plain=plain) as bar:
        for check in CHECKS:
            bar.detail(_name(check))
            findings += [finding.words for finding in check(subject)]
            bar.advance()
    return Preflight(tuple(findings), ledger_spec(config, subject.source))


def diagnose(config: RunConfig) -> list[CheckFinding]:
    """Run the checks of ``preflight``, continue after failures, and return all findings. Engines make their
    trials again, also those that passed before."""
    subject = _Subject(config, asks_again=True)
    found: list[CheckFinding] = []
    with progress("checking", total=len(CHECKS), unit="checks") as bar:
        for check in CHECKS:
            bar.detail(_name(check))
            try:
                found += check(subject)
            except (ConfigError, DataError, LedgerUnavailable, LedgerRefused) as error:
                # later checks that need the same file fail in the same way
                if all(str(error) != one.found for one in found):
                    found.append(refuse(_name(check), str(error)))
            bar.advance()
    return found


def _name(check: Callable[[_Subject], list[CheckFinding]]) -> str:
    return check.__name__.lstrip("_").replace("_", " ")


class _Subject:
    """A configuration, with the files that several checks need, each read once."""

    def __init__(self, config: RunConfig, *, asks_again: bool = False, ask_running: AskedProcess | None = None) -> None:
        self.config = config
        self.ask_running = ask_running
        self.asks_again = asks_again
        """Repeat the engines' trials that passed before (``passed``)."""
        self._failed: DataError | ConfigError | None = None

    @cached_property
    def model(self) -> dict[str, Any]:
        """``config.json`` of the policy. Raises DataError."""
        return read_model_config(self.config.model.path)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The policy's tokenizer. Raises DataError."""
        return load_text_tokenizer(self.config.model.path)

    @property
    def source(self) -> PromptSource:
        """The prompts. Raises DataError or ConfigError; data that failed is not read again."""
        if self._failed is not None:
            raise self._failed
        try:
            return self._source
        except (DataError, ConfigError) as error:
            self._failed = error
            raise

    @cached_property
    def _source(self) -> PromptSource:
        return PromptSource(self.config, self.tokenizer)


def _fleet(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    check_fleet_size(most_counts(config), config.fleet.max_workers, this_machine(), config.launch.elsewhere)
    check_gpus(config, most_counts(config))
    return []


def _models(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    kind = subject.model.get("model_type", "unknown type")
    planned = config.fleet.planned_for
    if planned and planned != (found := model_digest(config.model.path, with_weights=False)):
        raise ConfigError(
            f"the fleet was planned for a model whose config.json has digest ..{planned[-12:]}, but that of "
            f"{config.model.path} has ..{found[-12:]}: its splits and sizes are for that model. Plan again with "
            "`headrace plan`, or remove fleet.planned_for"
        )
    if config.model.reference_path is not None:
        read_model_config(config.model.reference_path)
    if config.value.path is not None and config.declaration.has_critic:
        value_source(config.value.path)
    _check_reward_model(config)
    check_stop_strings(config, subject.tokenizer)
    return [fine("model", f"model: {config.model.path} ({kind})")]


def _data(subject: _Subject) -> list[CheckFinding]:
    config, source = subject.config, subject.source
    lines = source.report.lines() + (source.responses.lines() if source.responses else [])
    found = [fine("data", f"training: {line}") for line in lines]
    if config.has_evaluation:
        found += [fine("data", f"evaluation: {line}") for line in source.evaluation_report.lines()]
        found += [warn("data", line) for line in _check_held_out(config, source)]
    return found


def _prompts(subject: _Subject) -> list[CheckFinding]:
    return check_prompts(subject.config, subject.source, subject.tokenizer)


def _length(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    needed = config.data.max_prompt_tokens + config.generation.max_response_tokens
    limit, because = longest_context(subject.model)
    if limit is not None and needed > limit:
        raise ConfigError(
            f"data.max_prompt_tokens + generation.max_response_tokens is {needed}, but {config.model.path} {because}: lower "
            "one of them"
        )
    return []


def _memory(subject: _Subject) -> list[CheckFinding]:
    """Compare each role's needs with the room. Raises ConfigError if certain needs cannot fit."""
    config = subject.config
    shapes = shapes_of(config, subject.model)
    if shapes is None:
        return []
    found = needs(config, shapes[0], desired_counts(config), shapes[1], on_cpu=is_cpu)
    return judge(found, room_here(this_machine()), in_shared_memory=config.weights.shared_memory)


def _devices(subject: _Subject) -> list[CheckFinding]:
    return [fine("devices", told_cards(subject.config))]


def _learner(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    lines = [*check_ranks(config), *check_lora(config), *check_optimizer(config)]
    return [fine("learner", line) for line in lines]


def _settings(subject: _Subject) -> list[CheckFinding]:
    unread = [warn("settings", line) for line in in_words(subject.config)]
    return [*unread, *lint(subject.config, this_machine())]


def _ledger_size(subject: _Subject) -> list[CheckFinding]:
    return [fine("ledger size", check_ledger_size(subject.config))]


def _sinks(subject: _Subject) -> list[CheckFinding]:
    return check_sinks(subject.config)


def _tracing(subject: _Subject) -> list[CheckFinding]:
    check_tracing(subject.config.tracing)
    return []


def _engines(subject: _Subject) -> list[CheckFinding]:
    return [fine("engines", line) for line in check_engines(subject.config, asks_again=subject.asks_again)]


def _reward_model(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    if config.reward.model is not None:
        _check_conversation(config.reward.model, subject.source)
        return [fine("reward model", f"reward model: {config.reward.model.path}")]
    if by_model := sorted(subject.source.verifiers & BY_MODEL):
        raise ConfigError(
            f"verifier {by_model[0]} needs a reward model's score, but no reward model is configured; set "
            f"reward.model.path, or choose another verifier"
        )
    return []


def _vllm(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    lines: list[str] = []
    if config.generation.engine == "vllm":
        lines.append(check_vllm(config, subject.model))
    if config.scores_with_vllm:
        lines.append(check_vllm_reference(config, read_model_config(config.reference_model)))
    if lines:
        ask_vllm(config, asks_again=subject.asks_again, ask_running=subject.ask_running)
    return [fine("vllm", line) for line in lines]


def _guidance(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    if not config.needs_guidance:
        return []
    return check_guidance(config, GuidedPrompts(subject.tokenizer, config.guidance))


def _environment(subject: _Subject) -> list[CheckFinding]:
    section = subject.config.environment
    if not section.name or Role.ENVIRONMENT in subject.config.launch.elsewhere:
        return []
    # one of another package begins an episode too: its rows have a seed or an index
    is_other = section.path in BUILT_IN_ENVIRONMENTS and section.path != TOOLS
    asyncio.run(_check_environment(section, subject.source.at(0).extra if is_other else None))
    with_network = "python" in section.tools and section.arguments.get("allow_network")
    risk = "; the model's programs may use the network (environment.arguments.allow_network)" if with_network else ""
    found = [fine("environment", f"environment: {section.agent or section.path}{risk}")]
    if tail := getattr(subject.config.algorithm, "tail_drop_tokens", 0):
        unlearned = (
            f"the last {tail} tokens of each turn but the last do not train the policy (algorithm.tail_drop_tokens)"
        )
        do = "take another rule if turns are short, such as dapo or vapo"
        found.append(warn("environment", unlearned, "turns that are much longer", do))
    return found


def _address(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    if config.wire.transport != "tcp":
        return []
    host = config.wire.host
    first, _, last = (config.wire.ports or "0").partition("-")
    if not 0 <= int(first) <= int(last or first) <= 65535:
        raise ConfigError(f"wire.ports is {config.wire.ports}, expected FIRST-LAST up to 65535, such as 5600-5700")
    family = socket.AF_INET6 if wants_ipv6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((numeric(host), 0))
        except OSError as error:
            raise ConfigError(f"wire.host is {config.wire.host}, which cannot be listened on here: {error}") from None
    Endpoint("tcp", host=host).told(advertised(config.wire.advertise_host))
    return []


def _ledger(subject: _Subject) -> list[CheckFinding]:
    config = subject.config
    ledger_spec(config, subject.source)
    return [warn("ledger", line) for line in asyncio.run(_check_ledger(subject.config))]


def _verifiers(subject: _Subject) -> list[CheckFinding]:
    verifiers = subject.source.verifiers
    asyncio.run(_check_verifiers(subject.config, verifiers))
    functions = subject.config.reward.functions.items()
    lines = [f"verifiers: {', '.join(sorted(verifiers))}"]
    lines += [f"reward {name}: {function.weight:g} * {function.verifier}" for name, function in functions]
    return [fine("verifiers", line) for line in lines]


def _enough_prompts(subject: _Subject) -> list[CheckFinding]:
    config, source = subject.config, subject.source
    needed = config.algorithm.groups_per_update
    if config.data.epochs is not None and source.num_prompts * config.data.epochs < needed:
        raise ConfigError(
            f"{_files(source)} has {source.num_prompts} usable prompts for {config.data.epochs} epochs, but one update needs "
            f"{needed} groups: add prompts, raise data.epochs, or lower algorithm.groups_per_update"
        )
    return []


CHECKS: Final[tuple[Callable[[_Subject], list[CheckFinding]], ...]] = (
    _fleet, _models, _data, _prompts, _length, _memory, _devices, _learner, _settings, _ledger_size, _sinks, _tracing,
    _reward_model, _guidance, _address, _ledger, _verifiers, _environment, _enough_prompts, _engines, _vllm,
)  # fmt: skip
"""All checks, in display order; the last two may import torch or vLLM. Each returns findings, or raises an error
with a remedy."""


def _files(source: PromptSource) -> str:
    return "data.responses" if source.responses is not None else "data.train"


def _check_held_out(config: RunConfig, source: PromptSource) -> list[str]:
    """Return a warning about evaluation prompts that are also training prompts, if that is allowed.
    Raises DataError if it is not."""
    both = source.overlap()
    if not both:
        return []
    named = ", ".join(f"{held_out} is {trained}" for held_out, trained in both[:_MAX_NAMED])
    more = ", ..." if len(both) > _MAX_NAMED else ""
    of = f"{len(both)} of {source.num_evaluation_prompts} evaluation prompts"
    found = f"{of} are training prompts too ({named}{more})"
    if config.data.allow_overlap:
        return [f"evaluation: {found}: accuracy is not held-out"]
    raise DataError(
        f"{found}, so accuracy would not be held-out: remove them from {_files(source)} or data.evaluation, or set "
        "data.allow_overlap"
    )


def _check_reward_model(config: RunConfig) -> None:
    """Check the reward model's folder, and that it can read the longest response."""
    judge = config.reward.model
    if judge is None:
        return
    longest = longest_input(judge.path, check_reward_model(judge.path), judge.max_tokens)
    needed = config.data.max_prompt_tokens + config.generation.max_response_tokens
    if longest is not None and needed > longest:
        raise ConfigError(
            f"data.max_prompt_tokens + generation.max_response_tokens is {needed}, but the reward model {judge.path} reads at "
            f"most {longest} tokens. Lower one of them, or raise reward.model.max_tokens if that is the limit"
        )


def _check_conversation(judge: RewardModelSection, source: PromptSource) -> None:
    """Apply the reward model's chat template to a prompt. Raises DataError if it refuses."""
    try:
        conversation_tokens(load_text_tokenizer(judge.path), source.at(0), "a response")
    except DataError as error:
        raise DataError(f"reward.model.path {judge.path}: {error}") from error


async def _check_ledger(config: RunConfig) -> tuple[str, ...]:
    """Return warnings about what a running server promises. Raises ConfigError if the server would
    lose parts of the ledger, LedgerUnavailable if it does not answer."""
    url = external_url(config.ledger.url, os.environ)
    if url is None:
        return ()
    if not config.ledger.allow_plaintext:
        refuse_plaintext(url, "set ledger.allow_plaintext")
    client = connect(url, patience_s=_ANSWER_S)
    try:
        # One deadline for all of its answers.
        async with asyncio.timeout(2 * _ANSWER_S):
            terms = await read_promises(client, "ledger.url" if config.ledger.url else "REDIS_URL")
    except TimeoutError as error:
        raise LedgerUnavailable(
            f"the ledger server {hide_password(url)} answers too slowly: expected its terms within {2 * _ANSWER_S:g} s"
        ) from error
    finally:
        await client.aclose()
    fleet = config.fleet
    num_workers = 1 + fleet.generator + fleet.reward + fleet.reference + fleet.value
    return judge_terms(terms, hide_password(url), num_workers=num_workers)


async def _check_environment(section: EnvironmentSection, row: dict[str, Any] | None) -> None:
    """Load the class as an environment worker would, and begin an episode with a row. Raises ConfigError."""
    for folder in section.folders:
        if not folder.is_dir():
            raise ConfigError(f"environment.folders names {folder}, which is not a folder; correct or remove it")
    failed: ConfigError | None = None
    async with asyncio.TaskGroup() as tasks:
        pool = EnvironmentPool(section, tasks.create_task)
        try:
            await pool.check()
            if row is not None:
                await pool.answer(EpisodeCall(number=0, episode="check", row=row))
        except ConfigError as error:
            failed = error
        except EnvironmentFailed as error:
            failed = ConfigError(f"a line of data.train cannot begin an episode of {section.path}: {error}")
        finally:
            await pool.aclose()
    if failed is not None:
        raise failed


async def _check_verifiers(config: RunConfig, verifiers: frozenset[str]) -> None:
    """Import every verifier of the data, as a reward worker would. Raises ConfigError."""
    for folder in config.reward.path:
        if not folder.is_dir():
            raise ConfigError(f"reward.path names {folder}, which is not a folder; correct or remove it")
    version = config.code.rewards
    code = checked_code(config.run_dir, version, starts=REWARDS) if version else None
    async with VerifierPool(config.reward, configured=config.verifier_paths, code=code) as pool:
        await pool.start(verifiers)
        for function in config.reward.functions.values():
            await pool.start([function.verifier], whole_group=function.whole_group)
        if config.needs_guidance and config.guidance.judgments:
            await pool.start_judgments(config.guidance.judgments)
