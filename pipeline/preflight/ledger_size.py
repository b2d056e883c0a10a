"""How much of the ledger's memory the settings let be used at once, and whether it has so much.

*Consumes* a configuration. *Produces* bytes, or a refusal that says which setting to change. *Waits
for* nothing; plain arithmetic, which ops/RUNBOOK.md tells in words with the same example (a test
holds the two together).

    a response of L tokens in n windows of W     n = ceil(L / W)
      tokens, log-probs, text                    12 L          (4 bytes each)
      what scorers add                           4 L each      (reference log-probs, values)
      prefixes: each chunk carries what is       4 W n (n - 1) / 2
      before it
      prompt and books of each chunk             n (8 P + 1536)
    in flight                                    (eta + 2) x oversampling x the responses of a batch
    a batch of T-PPO                             windows: each with its longest prefix, L - W
    with a critic                                one value batch of finished responses besides

Every response is taken to be as long as it may become: what fits then always fits. The server stops
admission at ``ledger.watermark`` of its memory, so that is what there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.schema import RunConfig, declaration
from pipeline.ledger.contract import Unit
from protocol.errors import ConfigError

_TOKEN_BYTES = 12
"""Of a sampled token: its id, its log-prob, and its text in the final chunk."""
_FIELD_BYTES = 4
_PROMPT_TOKEN_BYTES = 8
"""Of a prompt's token, in every chunk: its id, and its text."""
_CHUNK_BYTES = 1536
"""Of a chunk: its names, answer and segments, its keys and indexes on the server, the frames of its
scores.
"""
_MB = 2**20


@dataclass(frozen=True, slots=True)
class LedgerLoad:
    """What may be in the ledger at once, at most."""

    batch_bytes: int
    """Of one update's batch."""
    in_flight_bytes: int
    """Of all that is admitted and not settled, value batches included."""


def response_bytes(*, length: int, window: int, prompt: int, num_fields: int) -> int:
    """Return what all chunks of one response take.

    Args:
        length: Its tokens.
        window: Tokens of a chunk, at most.
        prompt: Tokens of its prompt.
        num_fields: Scores of a number a token: reference log-probs, values.
    """
    num_chunks = math.ceil(length / window)
    prefixes = _FIELD_BYTES * window * num_chunks * (num_chunks - 1) // 2
    tokens = (_TOKEN_BYTES + _FIELD_BYTES * num_fields) * length
    return tokens + prefixes + num_chunks * (_PROMPT_TOKEN_BYTES * prompt + _CHUNK_BYTES)


def chunk_bytes(*, length: int, window: int, prompt: int, num_fields: int) -> int:
    """Return what the last chunk of a response of ``length`` tokens takes, with all that is before
    it.
    """
    tokens = (_TOKEN_BYTES + _FIELD_BYTES * num_fields) * min(window, length)
    return tokens + _FIELD_BYTES * max(0, length - window) + _PROMPT_TOKEN_BYTES * prompt + _CHUNK_BYTES


def ledger_load(config: RunConfig) -> LedgerLoad:
    """Return what the settings let be in the ledger at once."""
    algorithm, generation = config.algorithm, config.generation
    has_critic = declaration(config).has_critic
    size = {
        "length": generation.max_response_tokens,
        "window": generation.window_tokens,
        "prompt": config.data.max_prompt_tokens,
        "num_fields": int(config.needs_reference) + int(has_critic),
    }
    unit = chunk_bytes(**size) if declaration(config).unit is Unit.CHUNK else response_bytes(**size)
    batch = algorithm.groups_per_update * algorithm.group_size * unit
    in_flight = math.ceil((config.staleness.eta + 2) * algorithm.oversampling * batch)
    if has_critic:
        whole = size | {"window": generation.max_response_tokens}
        in_flight += config.value.batch_trajectories * response_bytes(**whole)
    return LedgerLoad(batch, in_flight)


def check_ledger_size(config: RunConfig) -> str:
    """Return a sentence about the ledger's memory.

    Raises:
        ConfigError: It cannot hold one batch, or what the settings let be in flight.
    """
    load, ledger = ledger_load(config), config.ledger
    there = int(ledger.watermark * ledger.max_memory_mb * _MB)
    needed = max(load.batch_bytes, load.in_flight_bytes)
    if needed <= there:
        return f"ledger: at most {needed / _MB:,.1f} of {there / _MB:,.1f} MB are in use"
    what = "one batch" if load.batch_bytes > there else "what may be in flight"
    enough = math.ceil(needed / ledger.watermark / _MB)
    raise ConfigError(
        f"ledger.max_memory_mb is {ledger.max_memory_mb}, of which ledger.watermark {ledger.watermark:g} is "
        f"{there / _MB:,.1f} MB, but {what} may take {(load.batch_bytes if what == 'one batch' else needed) / _MB:,.1f} MB: "
        f"set ledger.max_memory_mb to {enough} or more, or lower staleness.eta, algorithm.oversampling, "
        "algorithm.groups_per_update or generation.max_response_tokens, or take longer windows (generation.window_tokens)"
    )
