"""The records of the update log: everything that training reads of the claimed units, in compact
form.

    Start      a learner, or a segment, begins: from which state, under which settings, versions, threads and random streams
    Batch      an update begins: the claim, and the learner's version
    Units      some of its units, in order; as many records as needed
    Outcome    the update is done: its published version, and the digest of every weight tensor
    End        the segment is complete

Chunks and scores are the ledger's own blobs, without what training does not read: a prompt's text,
answer and extra columns (``prompt_id`` finds them), the response's text, and the texts of its
guidance. Repeated data is stored once: a prompt shared by chunks, and a context that is the tokens
of the trajectory's previous chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec
import numpy as np

from pipeline.ledger.stored import read_chunk, read_scores
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from protocol.codec import to_blob
from protocol.errors import DataError
from protocol.trajectory import Field, GivenSpan, Prompt, RewardScore, Score, Turn

FORMAT: Final = 1
FRAME_BYTES: Final = 1 << 20
"""A Units record is closed at this size before compression; a unit is never split."""

Digests: TypeAlias = dict[str, bytes]
"""xxh3-128 of each weight tensor's bytes, by name."""


class Origin(StrEnum):
    """Where a segment's first state comes from."""

    START_MODEL = "start_model"
    CHECKPOINT = "checkpoint"
    SNAPSHOT = "snapshot"
    """A state in the host's memory, left by an earlier learner."""
    CONTINUED = "continued"
    """The previous segment, of the same learner."""
    AFTER_FAILURE = "after_failure"
    """Updates that could not be logged because the disk was full."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a segment: the state it continues from, and what numbers depend on."""

    format: int = FORMAT
    run: str
    learner: str
    """Its incarnation: ``learner#3``."""
    origin: Origin
    checkpoint: str | None = None
    """The checkpoint's name if it is the origin."""
    state_version: int
    """Version when the state was made; ``policy_version`` is higher if a restored state was renumbered."""
    policy_version: int
    """The version published for it."""
    num_updates: int
    """Updates of the run before it."""
    config: str
    """Every setting, as TOML, without the ledger's address."""
    environment: dict[str, str]
    """Whatever else results depend on: threads, device, processor, library versions."""
    seed: int
    """The run's seed; every sampled token is drawn from (seed, trajectory, position)."""
    random_state: dict[str, bytes]
    """Torch's random states, by device."""
    digests: Digests
    at_s: float
    sources: dict[str, str] = {}
    """Digests of the modules of user-defined objectives (``own_sources``)."""
    restarts: tuple[tuple[int, int], ...] = ()
    """For each learner so far: the first version it published, and the updates in it."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    update: int
    """1 for the first of the run."""
    policy_version: int
    """The learner's version before the update."""
    claim: str
    units: tuple[str, ...]
    """Unit names, in order."""
    at_s: float
    settings: dict[str, str] = {}
    """Settings changed since the learner started, as TOML values by key; ``Start.config`` has the original ones."""
    loss_limit: float = math.inf
    """A step with a larger loss (in magnitude) is a spike."""
    grad_norm_limit: float = math.inf


class UpdateOutcome(msgspec.Struct, frozen=True, kw_only=True):
    update: int
    policy_version: int
    """The published version; the batch's own if no step was applied, since nothing was published."""
    refused: tuple[str, ...]
    """Units left out because they contained NaN or infinity."""
    losses: tuple[float, ...]
    """One per optimiser step."""
    grad_norms: tuple[float, ...]
    applied: tuple[bool, ...]
    digests: Digests


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The last record of a complete segment."""

    num_records: int
    """Number of records before this one."""


class LoggedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """The part of a prompt that training reads."""

    prompt_id: str
    tokens: bytes
    """int32, little-endian"""


class LoggedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk and its scores as blobs of ``protocol.codec``."""

    blob: bytes
    """Without its prompt."""
    prompt: int
    """Index in ``Units.prompts``."""
    is_context_cut: bool
    """Whether the context is left out because it is the tokens of the chunks before."""
    scores: dict[Field, bytes]


class LoggedUnit(msgspec.Struct, frozen=True, array_like=True):
    name: str
    trajectories: tuple[tuple[LoggedChunk, ...], ...]


class Units(msgspec.Struct, frozen=True, kw_only=True):
    """Some units of the last batch."""

    prompts: tuple[LoggedPrompt, ...]
    units: tuple[LoggedUnit, ...]


Record: TypeAlias = Start | Batch | Units | UpdateOutcome | End
KINDS: Final[tuple[type[Record], ...]] = (Start, Batch, Units, UpdateOutcome, End)
"""A record's kind on disk is its index here, from 1."""

_NOTHING = np.empty(0, np.int32)
_NO_PROMPT = Prompt(prompt_id="", tokens=_NOTHING, text="", answer="", verifier="")


def pack_units(units: Sequence[ClaimedUnit]) -> Iterator[Units]:
    """Yield records that contain ``units``, in order."""
    packer = _Packer()
    for unit in units:
        packer.add(unit)
        if packer.num_bytes >= FRAME_BYTES:
            yield packer.pop_record()
    if packer.units:
        yield packer.pop_record()


def unpack_units(record: Units) -> list[ClaimedUnit]:
    """Return the units passed to ``pack_units``, without texts. Raises DataError, WireError."""
    prompts = [
        Prompt(prompt_id=p.prompt_id, tokens=_int32(p.tokens), text="", answer="", verifier="") for p in record.prompts
    ]
    return [
        ClaimedUnit(unit.name, tuple(_unpack_trajectory(unit.name, chunks, prompts) for chunks in unit.trajectories))
        for unit in record.units
    ]


class _Packer:
    """Collects units until they fill a record."""

    def __init__(self) -> None:
        self._places: dict[LoggedPrompt, int] = {}
        self.units: list[LoggedUnit] = []
        self.num_bytes = 0

    def add(self, unit: ClaimedUnit) -> None:
        self.units.append(LoggedUnit(unit.name, tuple(self._trajectory(chunks) for chunks in unit.trajectories)))

    def pop_record(self) -> Units:
        record = Units(prompts=tuple(self._places), units=tuple(self.units))
        self._places, self.units, self.num_bytes = {}, [], 0
        return record

    def _trajectory(self, chunks: Sequence[ScoredChunk]) -> tuple[LoggedChunk, ...]:
        stored: list[LoggedChunk] = []
        before, given = _NOTHING, tuple[GivenSpan, ...]()
        for scored in chunks:
            chunk = scored.chunk
            is_cut = (
                chunk.context_tokens.size > 0
                and chunk.given_spans == given
                and np.array_equal(chunk.context_tokens, before)
            )
            slim = msgspec.structs.replace(
                chunk,
                prompt=_NO_PROMPT,
                context_tokens=_NOTHING if is_cut else chunk.context_tokens,
                given=msgspec.UNSET if is_cut else chunk.given,
                response_text=None,
                raw_text=msgspec.UNSET,
                asked=msgspec.UNSET,
            )
            scores = {field: to_blob(_without_texts(score)) for field, score in scored.scores.items()}
            stored.append(LoggedChunk(to_blob(slim), self._place(chunk.prompt), is_cut, scores))
            self.num_bytes += len(stored[-1].blob) + sum(map(len, scores.values()))
            before, given = _context_after(scored)
        return tuple(stored)

    def _place(self, prompt: Prompt) -> int:
        stored = LoggedPrompt(prompt.prompt_id, prompt.tokens.astype("<i4").tobytes())
        if stored not in self._places:
            self.num_bytes += len(stored.tokens)
        return self._places.setdefault(stored, len(self._places))


def _without_texts(score: Score) -> Score:
    """Drop what training does not read: the texts of guidance, and an environment's text and request."""
    if isinstance(score, RewardScore) and score.guidance is not None:
        return msgspec.structs.replace(score, guidance=None)
    if isinstance(score, Turn):
        return msgspec.structs.replace(score, text="", asks=msgspec.UNSET)
    return score


def _context_after(scored: ScoredChunk) -> tuple[np.ndarray, tuple[GivenSpan, ...]]:
    turn = scored.scores.get(Field.TURN)
    return scored.chunk.context_after(turn if isinstance(turn, Turn) else None)


def _unpack_trajectory(unit: str, chunks: Sequence[LoggedChunk], prompts: Sequence[Prompt]) -> tuple[ScoredChunk, ...]:
    found: list[ScoredChunk] = []
    before, given = _NOTHING, tuple[GivenSpan, ...]()
    for stored in chunks:
        if not 0 <= stored.prompt < len(prompts):
            raise DataError(
                f"unit {unit} names prompt {stored.prompt} of {len(prompts)}; the update log was not written by this release"
            )
        chunk = read_chunk(stored.blob)
        if not stored.is_context_cut:
            before, given = chunk.context_tokens, chunk.given_spans
        scores = read_scores(stored.scores)
        whole = msgspec.structs.replace(
            chunk,
            prompt=prompts[stored.prompt],
            context_tokens=before,
            given=given or msgspec.UNSET,
        )
        found.append(ScoredChunk(whole, scores))
        before, given = _context_after(found[-1])
    return tuple(found)


def _int32(data: bytes) -> np.ndarray:
    if len(data) % 4:
        raise DataError(
            f"a prompt has {len(data)} bytes, which is not a whole number of int32; the update log was not written "
            f"by this release"
        )
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)
