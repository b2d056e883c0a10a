"""What a piece of work costs, by role: seconds, as a function of sequences and tokens.

Costs come from a TOML file, from a run (``pipeline.plan.profile``), or from a model's configuration and a device's
figures (``pipeline.plan.transformer``). A file has a section for each role that a run has:

    [generator]
    slots = 64
    decode_base_s = 0.012
    decode_sequence_s = 2e-5

    [learner]
    token_s = 1.3e-4

    [reward]
    piece_s = 0.002
    concurrency = 4

``[weights]``, ``[ledger]`` and ``[wire]`` have defaults: figures measured on two cores, ``ops/results/weights.md``,
``workers.md`` and ``core.md``."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tomli_w

from protocol.errors import ConfigError
from protocol.ids import Role

NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a file; all times in seconds."""


class GeneratorCosts(_Section, frozen=True):
    """Of one generator, whatever its number of devices."""

    slots: Count = 64
    """Sequences decoded at once."""
    decode_base_s: NotNegative = 0.0
    """A decode step, however many sequences it has."""
    decode_sequence_s: NotNegative = 0.0
    """Each sequence of a decode step."""
    decode_context_token_s: NotNegative = 0.0
    """Each token of their contexts: reading its keys and values. Costs measured in a run have it in the sequence's."""
    prefill_token_s: NotNegative = 0.0
    """Costs measured in a run have it in the sequence's."""
    mean_live: NotNegative = 0.0
    """Sequences of a decode step on average, as measured: slots that come free wait for the end of a turn. 0: unknown."""

    def decode_s(self, sequences: float, context_tokens: float = 0.0) -> float:
        """Return the time of a decode step; ``context_tokens``: of all its sequences together."""
        base_s = self.decode_base_s + self.decode_sequence_s * sequences
        return base_s + self.decode_context_token_s * context_tokens


class LearnerCosts(_Section, frozen=True):
    """Of the learner, whatever its number of ranks."""

    base_s: NotNegative = 0.0
    """An optimiser step, however large."""
    sequence_s: NotNegative = 0.0
    token_s: NotNegative = 0.0
    """A prompt or response token, through all passes of an update."""
    update_s: NotNegative = 0.0
    """An update besides its steps: its data, records, copies and checkpoints."""
    publish_s: NotNegative = 0.0
    """Publishing the new weights."""

    def compute_s(self, sequences: float, tokens: float, steps: int = 1) -> float:
        """Return the time of an update's optimiser steps, of so many sequences and tokens together."""
        return steps * self.base_s + self.sequence_s * sequences + self.token_s * tokens

    def whole_update_s(self, sequences: float, tokens: float, steps: int = 1) -> float:
        """Return the time of an update that waits for nothing."""
        return self.compute_s(sequences, tokens, steps) + self.update_s + self.publish_s


class ScorerCosts(_Section, frozen=True):
    """Of one worker that judges or scores: reward, reference, value, environment."""

    base_s: NotNegative = 0.0
    """A batch of chunks, however large."""
    piece_s: NotNegative = 0.0
    """Each chunk."""
    token_s: NotNegative = 0.0
    """Each of its tokens, with those of its context."""
    concurrency: Count = 1
    """Chunks under way at once in one worker."""

    def batch_s(self, pieces: float, tokens: float) -> float:
        return self.base_s + self.piece_s * pieces + self.token_s * tokens


class WeightsCosts(_Section, frozen=True):
    """Of a published version."""

    num_bytes: NotNegative = 0.0
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0.0)] = 5.6e9
    """From the start of publishing until a generator has verified it. By file and shared memory 1 GB took 0.186 s;
    by the wire on loopback, encrypted, 268 MB took 1.16 s: 2.3e8."""
    travel_base_s: NotNegative = 0.01
    """Of the smallest version: announcing, and the decode step in progress."""
    load_s: NotNegative = 0.0
    """How long a generator decodes nothing while it swaps them in."""

    @property
    def travel_s(self) -> float:
        """Seconds from an update's end until a generator can load its weights."""
        return self.travel_base_s + self.num_bytes / self.bytes_per_s


class LedgerCosts(_Section, frozen=True):
    """Processor time of the ledger's server, which has one core for commands. The path of a chunk from lease to settle
    took 241 microseconds of it with 1,024 tokens and 774 with 16,384; 1,000 idle workers take 6.2 % of a core."""

    chunk_s: NotNegative = 2.05e-4
    token_s: NotNegative = 3.5e-8
    worker_share: NotNegative = 6.2e-5
    """Share of a core for each worker's heartbeats and polls."""
    answer_s: NotNegative = 2e-3
    """From a call to its answer, besides the server's time: both ends of the connection."""

    def served_s(self, tokens: float) -> float:
        """Return the server's time for one chunk."""
        return self.chunk_s + self.token_s * tokens


class WireCosts(_Section, frozen=True):
    """Of a message between two processes. The hops of a chunk of 8,192 tokens took 428 microseconds of two cores."""

    message_s: NotNegative = 1e-4
    token_s: NotNegative = 4e-8

    def sent_s(self, tokens: float) -> float:
        return self.message_s + self.token_s * tokens


class Costs(_Section, frozen=True):
    """Of all roles of a run, on the devices that each has."""

    generator: GeneratorCosts
    learner: LearnerCosts
    reward: ScorerCosts | None = None
    reference: ScorerCosts | None = None
    value: ScorerCosts | None = None
    environment: ScorerCosts | None = None
    weights: WeightsCosts = WeightsCosts()
    ledger: LedgerCosts = LedgerCosts()
    wire: WireCosts = WireCosts()
    source: str = ""
    """Where they come from, for people."""
    busy: NotNegative = 0.0
    """Workers that computed at once while they were measured. More than there were cores slow one another down."""

    def scorer(self, role: Role) -> ScorerCosts:
        """Return a scoring role's costs. Raises ConfigError if they are missing."""
        found: ScorerCosts | None = getattr(self, str(role), None)
        if found is None:
            raise ConfigError(
                f"the costs{f' of {self.source}' if self.source else ''} have no {role}, but the run has that role: add "
                f"[{role}] with piece_s and token_s"
            )
        return found


def read_costs(path: Path) -> Costs:
    """Read a file of costs. Raises ConfigError for one that is missing, is not TOML, lacks a role, or has an unknown key
    or a negative number."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; expected a file of costs in TOML") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        found = msgspec.convert({"source": str(path), **tree}, Costs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explained(str(error), tree)}") from error
    for name, section in tree.items():
        if isinstance(section, dict) and (
            odd := [key for key, value in section.items() if not math.isfinite(float(value))]
        ):
            raise ConfigError(f"{path}: {name}.{odd[0]} is {section[odd[0]]}; expected a finite number")
    if not found.generator.decode_s(1.0, 1.0):
        raise ConfigError(f"{path}: a decode step takes no time; expected generator.decode_base_s or another above 0")
    if not found.learner.whole_update_s(1.0, 1.0):
        raise ConfigError(f"{path}: an update takes no time; expected learner.token_s or another above 0")
    return found


def _explained(error: str, tree: dict[str, Any]) -> str:
    """Return msgspec's sentence with what would be right."""
    key = ".".join(re.findall(r"\$\.([\w.]+)", error))
    section, _, name = key.partition(".")
    if "missing required field" in error:
        role = error.split("`")[1]
        return f"[{role}] is missing, and every run has that role; found {', '.join(tree) or 'nothing'}"
    if "unknown field" in error:
        kind = {each.name: each for each in msgspec.structs.fields(Costs)}.get(section)
        known = Costs.__struct_fields__ if kind is None else _fields_of(kind.type)
        return (
            f"unknown key {error.split('`')[1]!r}{f' in [{section}]' if section else ''}; expected {', '.join(known)}"
        )
    if not name:
        return error
    value: Any = tree.get(section, {})
    got = value.get(name) if isinstance(value, dict) else value
    return f"{key} is {got!r}; {error[0].lower()}{error[1:].partition(' - at')[0]}"


def _fields_of(kind: Any) -> tuple[str, ...]:
    options: tuple[Any, ...] = getattr(kind, "__args__", (kind,))
    return options[0].__struct_fields__


def write_costs(costs: Costs, path: Path) -> None:
    """Raises ConfigError if the file cannot be written."""
    tree = {name: value for name, value in msgspec.to_builtins(costs).items() if value is not None}
    try:
        path.write_text(tomli_w.dumps(tree), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
