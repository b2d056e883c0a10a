"""All checks before a start, for ``headrace config check`` and ``headrace up``.

*Consumes* a configuration. *Produces* findings (skipped prompts, counts), or one error with a
remedy. *Waits for* sandbox processes that import the verifiers' modules, and for a configured
ledger server, each with a deadline."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import Any

from pipeline.config.learning import RewardModelSection
from pipeline.config.ledger_spec import ledger_spec
from pipeline.config.schema import RunConfig
from pipeline.config.unread import in_words
from pipeline.data.conversation import conversation_tokens
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.embedded import external_url
from pipeline.ledger.server.promises import judge_terms, read_promises
from pipeline.ledger.types import LedgerSpec
from pipeline.ledger.url import hide_password, refuse_plaintext
from pipeline.preflight.engines import check_engines
from pipeline.preflight.ledger_size import check_ledger_size
from pipeline.preflight.lora import check_lora
from pipeline.preflight.memory_needs import is_cpu, judge, needs, read_shape, room_here
from pipeline.preflight.model_folder import longest_context, read_model_config
from pipeline.preflight.optimizer import check_optimizer
from pipeline.preflight.ranks import check_ranks
from pipeline.preflight.reward_model import check_reward_model, longest_input
from pipeline.preflight.stop_strings import check_stop_strings
from pipeline.preflight.value_model import value_source
from pipeline.preflight.vllm import ask_vllm, check_vllm, check_vllm_reference
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.registry import BY_MODEL
from pipeline.runtime.machine import this_machine
from pipeline.supervisor.fleet_size import check_fleet_size, desired_counts
from protocol.endpoints import Endpoint
from protocol.errors import ConfigError, DataError, LedgerUnavailable
from protocol.hosts import advertised, numeric, wants_ipv6

_ANSWER_S = 5.0
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of checks that a configuration passed."""

    findings: tuple[str, ...]
    """Facts to show, in words."""
    spec: LedgerSpec


def preflight(config: RunConfig) -> Preflight:
    """Check model, data, verifiers and addresses. Raises ConfigError or DataError for a setting or
    a file that would make the run fail, LedgerUnavailable for a server that does not answer."""
    check_fleet_size(desired_counts(config), config.fleet.max_workers, this_machine(), config.launch.launched)
    model = read_model_config(config.model.path)
    if config.model.reference_path is not None:
        read_model_config(config.model.reference_path)
    if config.value.path is not None and config.declaration.has_critic:
        value_source(config.value.path)
    _check_reward_model(config)
    tokenizer = load_text_tokenizer(config.model.path)
    check_stop_strings(config, tokenizer)
    source = PromptSource(config, tokenizer)
    findings = [f"model: {config.model.path} ({model.get('model_type', 'unknown type')})"]
    findings += [f"training: {line}" for line in source.report.lines()]
    if config.has_evaluation:
        findings += [f"evaluation: {line}" for line in source.evaluation_report.lines()]
        findings += _check_held_out(config, source)
    _check_length(config, model)
    findings += [*_check_memory(config, model), *check_ranks(config), *check_lora(config)]
    findings += [*check_optimizer(config), *in_words(config)]
    findings.append(check_ledger_size(config))
    findings += check_engines(config)
    if config.reward.model is not None:
        _check_conversation(config.reward.model, source)
        findings.append(f"reward model: {config.reward.model.path}")
    elif by_model := sorted(source.verifiers & BY_MODEL):
        raise ConfigError(
            f"verifier {by_model[0]} takes a reward model's score, but there is none; set reward.model.path, or choose "
            "another verifier"
        )
    if config.generation.engine == "vllm":
        findings.append(check_vllm(config, model))
    if config.scores_with_vllm:
        findings.append(check_vllm_reference(config, read_model_config(config.reference_model)))
    if config.generation.engine == "vllm" or config.scores_with_vllm:
        ask_vllm(config)
    _check_address(config)
    findings += asyncio.run(_check_ledger(config))
    asyncio.run(_check_verifiers(config, source.verifiers))
    findings.append(f"verifiers: {', '.join(sorted(source.verifiers))}")
    functions = config.reward.functions.items()
    findings += [f"reward {name}: {function.weight:g} * {function.verifier}" for name, function in functions]
    needed = config.algorithm.groups_per_update
    if config.data.epochs is not None and source.num_prompts * config.data.epochs < needed:
        raise ConfigError(
            f"data.train has {source.num_prompts} usable prompts for {config.data.epochs} epochs, but one update needs "
            f"{needed} groups: add prompts, raise data.epochs, or lower algorithm.groups_per_update"
        )
    return Preflight(tuple(findings), ledger_spec(config, source))


def _check_held_out(config: RunConfig, source: PromptSource) -> list[str]:
    """Return the allowed overlap of the prompts, in words. Raises DataError for another."""
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
        f"{found}, so accuracy would not be held-out: remove them from data.train or data.evaluation, or set "
        "data.allow_overlap"
    )


def _check_length(config: RunConfig, model: dict[str, Any]) -> None:
    needed = config.data.max_prompt_tokens + config.generation.max_response_tokens
    limit, because = longest_context(model)
    if limit is not None and needed > limit:
        raise ConfigError(
            f"data.max_prompt_tokens + generation.max_response_tokens is {needed}, but {config.model.path} {because}: lower "
            "one of them"
        )


def _check_memory(config: RunConfig, model: dict[str, Any]) -> list[str]:
    """Return each role's needs and the room. Raises ConfigError when certain needs cannot fit."""
    shape = read_shape(config.model.path, model)
    if shape is None or config.learner.backend == "emulated":
        return []
    path = config.value.path
    value_shape = shape if path is None else read_shape(path, read_model_config(path))
    found = needs(config, shape, desired_counts(config), value_shape, on_cpu=is_cpu)
    return judge(found, room_here(this_machine()), in_shared_memory=config.weights.shared_memory)


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
    """Apply the reward model's chat template to a prompt. Raises DataError when it refuses."""
    try:
        conversation_tokens(load_text_tokenizer(judge.path), source.at(0), "a response")
    except DataError as error:
        raise DataError(f"reward.model.path {judge.path}: {error}") from error


async def _check_ledger(config: RunConfig) -> tuple[str, ...]:
    """Return warnings about a running server's promises. Raises ConfigError when the server would
    lose parts of the ledger, LedgerUnavailable when it does not answer."""
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
    return judge_terms(terms, hide_password(url))


async def _check_verifiers(config: RunConfig, verifiers: frozenset[str]) -> None:
    """Import every verifier of the data, as a reward worker would. Raises ConfigError."""
    for folder in config.reward.path:
        if not folder.is_dir():
            raise ConfigError(f"reward.path names {folder}, which is no folder; correct or remove it")
    async with VerifierPool(config.reward, configured=config.verifier_paths) as pool:
        await pool.start(verifiers)
        for function in config.reward.functions.values():
            await pool.start([function.verifier], whole_group=function.whole_group)


def _check_address(config: RunConfig) -> None:
    if config.wire.transport != "tcp":
        return
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
