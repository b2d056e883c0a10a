"""Checks that the ledger's memory holds all that the settings allow at once.

ops/docs/how-to/memory-and-disk.md has the arithmetic in words, with the same
example (a test compares them).

    a response of L tokens in n windows of W     n = ceil(L / W)
      tokens, log-probs, text                    12 L          (4 bytes each)
      scores (reference log-probs, values)       4 L each
      prefixes: a chunk has all before it        4 W n (n - 1) / 2
      prompt and metadata of each chunk          n (8 P + 1536)
      guidance of J judgment tokens, if any      8 L + 4 J
    in flight                                    (eta + 2) x oversampling x the responses of a batch
    a batch of T-PPO                             windows: each with its longest prefix, L - W
    with a critic                                one value batch of finished responses besides

Every response counts with its greatest length. The room is ``ledger.watermark`` of the server's
memory, where admission stops."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.schema import RunConfig
from pipeline.ledger.types import Unit
from protocol.errors import ConfigError

_TOKEN_BYTES = 12
"""Bytes of a sampled token: its id, its log-prob, and its text in the final chunk."""
_FIELD_BYTES = 4
_TEXT_BYTES = 4
"""Bytes of a judgment's token in the reward, as text."""
_PROMPT_TOKEN_BYTES = 8
"""Bytes of a prompt's token in every chunk: its id and its text."""
_CHUNK_BYTES = 1536
"""Other bytes of a chunk: names, answer, segments, keys, indexes, frames of scores."""
_MB = 2**20


@dataclass(frozen=True, slots=True)
class LedgerLoad:
    """Largest number of bytes in the ledger at once."""

    batch_bytes: int
    in_flight_bytes: int
    """Everything admitted and not settled, value batches included."""


def response_bytes(*, length: int, window: int, prompt: int, num_fields: int) -> int:
    """Return the bytes of all chunks of one response of ``length`` tokens after ``prompt`` tokens.
    A chunk has at most ``window`` tokens. ``num_fields`` scores have one number per token."""
    num_chunks = math.ceil(length / window)
    prefixes = _FIELD_BYTES * window * num_chunks * (num_chunks - 1) // 2
    tokens = (_TOKEN_BYTES + _FIELD_BYTES * num_fields) * length
    return tokens + prefixes + num_chunks * (_PROMPT_TOKEN_BYTES * prompt + _CHUNK_BYTES)


def chunk_bytes(*, length: int, window: int, prompt: int, num_fields: int) -> int:
    """Return the bytes of the last chunk of a response of ``length`` tokens, prefix included."""
    tokens = (_TOKEN_BYTES + _FIELD_BYTES * num_fields) * min(window, length)
    return tokens + _FIELD_BYTES * max(0, length - window) + _PROMPT_TOKEN_BYTES * prompt + _CHUNK_BYTES


def ledger_load(config: RunConfig) -> LedgerLoad:
    algorithm, generation = config.algorithm, config.generation
    has_critic = config.declaration.has_critic
    size = {
        "length": generation.max_response_tokens,
        "window": generation.window_tokens,
        "prompt": config.data.max_prompt_tokens,
        "num_fields": int(config.needs_reference) + int(has_critic),
    }
    unit = chunk_bytes(**size) if config.declaration.unit is Unit.CHUNK else response_bytes(**size)
    if config.needs_guidance:
        unit += 2 * _FIELD_BYTES * generation.max_response_tokens + _TEXT_BYTES * config.guidance.max_judgment_tokens
    batch = algorithm.groups_per_update * algorithm.group_size * unit
    in_flight = math.ceil((config.staleness.eta + 2) * algorithm.oversampling * batch)
    if has_critic:
        whole = size | {"window": generation.max_response_tokens}
        in_flight += config.value.batch_trajectories * response_bytes(**whole)
    return LedgerLoad(batch, in_flight)


def check_ledger_size(config: RunConfig) -> str:
    """Return a sentence about the ledger's memory. Raises ConfigError if it cannot hold all."""
    load, ledger = ledger_load(config), config.ledger
    there = int(ledger.watermark * ledger.max_memory_mb * _MB)
    needed = max(load.batch_bytes, load.in_flight_bytes)
    if needed <= there:
        return f"ledger: at most {needed / _MB:,.1f} of {there / _MB:,.1f} MB are in use"
    is_batch = load.batch_bytes > there
    enough = math.ceil(needed / ledger.watermark / _MB)
    raise ConfigError(
        f"ledger.max_memory_mb is {ledger.max_memory_mb}, of which ledger.watermark {ledger.watermark:g} is "
        f"{there / _MB:,.1f} MB, but {'one batch' if is_batch else 'work in flight'} may take "
        f"{(load.batch_bytes if is_batch else needed) / _MB:,.1f} MB: set ledger.max_memory_mb to {enough} or more. Or lower "
        "staleness.eta, algorithm.oversampling, algorithm.groups_per_update or generation.max_response_tokens, or raise "
        "generation.window_tokens"
    )
