"""Everything that can be known to be wrong before a process is started.

*Consumes* a configuration. *Produces* what a person should know (skipped prompts, counts), or one error that says what to do.
*Waits for* the verifiers' modules to import, in sandbox processes, with a deadline. The same checks stand behind
``headrace config check`` and ``headrace up``.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.algorithms.catalogue import declaration
from pipeline.config.schema import RunConfig
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.replay.buffer import LedgerSpec
from pipeline.replay.spec import ledger_spec
from pipeline.rewards.pool import VerifierPool
from pipeline.value_model import value_source
from protocol.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Preflight:
    """A configuration that can be started."""

    findings: tuple[str, ...]
    """What a person should know, in words."""
    spec: LedgerSpec
    """What the run's ledger is made with."""


def preflight(config: RunConfig) -> Preflight:
    """Check model, data, verifiers, addresses.

    Raises:
        ConfigError, DataError: the first thing that would make the run fail, and what to do about it.
    """
    model = _model_config(config.model.path)
    if config.model.reference_path is not None:
        _model_config(config.model.reference_path)
    if config.value.path is not None and declaration(config).has_critic:
        value_source(config.value.path)
    source = PromptSource.load(config, load_text_tokenizer(config.model.path))
    findings = [f"model: {config.model.path} ({model.get('model_type', 'unknown type')})"]
    findings += [f"training: {line}" for line in source.report.lines()]
    if config.data.evaluation:
        findings += [f"evaluation: {line}" for line in source.evaluation_report.lines()]
    _check_length(config, model)
    _check_address(config)
    asyncio.run(_check_verifiers(config, source.verifiers))
    findings.append(f"verifiers: {', '.join(sorted(source.verifiers))}")
    needed = config.algorithm.groups_per_update
    if config.data.epochs is not None and source.num_prompts * config.data.epochs < needed:
        raise ConfigError(
            f"data.train has {source.num_prompts} usable prompts for {config.data.epochs} epochs, but one update needs "
            f"{needed} groups: add prompts, raise data.epochs, or lower algorithm.groups_per_update"
        )
    return Preflight(tuple(findings), ledger_spec(config, source))


def _model_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is not a model: it has no config.json; give a folder in Hugging Face format") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not JSON: {error}; the model folder is damaged, download or make it again") from None


def _check_length(config: RunConfig, model: dict[str, Any]) -> None:
    limit = model.get("max_position_embeddings")
    needed = config.data.max_prompt_tokens + config.generation.max_response_tokens
    if isinstance(limit, int) and needed > limit:
        raise ConfigError(
            f"data.max_prompt_tokens + generation.max_response_tokens is {needed}, but {config.model.path} was made for "
            f"{limit} positions: lower one of them"
        )


async def _check_verifiers(config: RunConfig, verifiers: frozenset[str]) -> None:
    """Import every verifier that the data ask for, as a reward worker would. Raises ConfigError."""
    async with VerifierPool(config.reward) as pool:
        await pool.start(verifiers)


def _check_address(config: RunConfig) -> None:
    if config.wire.transport != "tcp":
        return
    family = socket.AF_INET6 if ":" in config.wire.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((config.wire.host, 0))
        except OSError as error:
            raise ConfigError(f"wire.host is {config.wire.host}, where nothing can listen here: {error}") from None
