"""The stream of prompts: maps a position to a prompt.

Files are read once, when the source is created. All workers of a run must have the same digest.

``at(position)`` is a pure function. The epoch is ``position // num_prompts``, and each epoch has
its own seeded order, so a position gives the same prompt in every process and after every restart,
and the ledger only needs a group's number. With several sets, ``mixture`` maps each position to a
set and a position in that set's own epochs.

Prompts are stored as MessagePack, in about the size of the files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.config.data_sets import DataSetSection, EvaluationSetSection
from pipeline.config.schema import RunConfig
from pipeline.data.columns import DIFFICULTY, ColumnMap
from pipeline.data.files import BadRow, read_rows
from pipeline.data.lines import PromptLine, Unusable, parse_line
from pipeline.data.mixture import Mixture, permuted_by_stages
from pipeline.data.places import local_file, named_files
from pipeline.data.prompt_form import CHAT_VARIABLES, MESSAGES, PromptForm
from pipeline.data.report import DataReport, SkipReason
from pipeline.data.responses import RecordedResponses
from pipeline.data.tokenizer import TextTokenizer
from pipeline.rewards.registry import RECORDED, resolve, resolve_named
from protocol.errors import ConfigError, DataError
from protocol.trajectory import Prompt

_SET_SEEDS = 1_000_003
"""Difference between the seeds of two sets."""
_STAGES = 10
"""Stages of a curriculum."""


class _PromptRecord(msgspec.Struct, frozen=True, array_like=True):
    prompt_id: str
    tokens: bytes
    """int32, little-endian"""
    text: str
    answer: str
    verifier: str
    extra: dict[str, Any]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_PromptRecord).decode


@dataclass(frozen=True, slots=True)
class HeldOutSource:
    """A set of held-out prompts."""

    name: str
    """Empty for ``data.evaluation``."""
    first: int
    """Index of its first prompt in ``PromptSource.evaluation_at``."""
    num_prompts: int
    digest: str = ""
    """Of its texts, answers and verifiers in order, so it is the same in every run with these prompts."""


class PromptSource:
    def __init__(self, config: RunConfig, tokenizer: TextTokenizer) -> None:
        """Read all prompt files of a configuration. Raises DataError if a file is missing or
        unreadable, or no line of the training or evaluation files is usable; ConfigError if the
        prompts cannot be rendered with this tokenizer, or a verifier does not exist."""
        data = config.data
        resolve(data.verifier)
        reader = _Reader(tokenizer, config)
        self._seed, self._shuffle, self._easy_first = config.run.seed, data.shuffle, data.curriculum == "easy-first"
        resolve(data.response_verifier)
        used = [one for one in data.sets if one.weight > 0.0]
        for one in (*used, *config.evaluation.sets):
            resolve(one.verifier or data.verifier)
        self.responses = RecordedResponses(config, tokenizer) if data.responses else None
        """Recorded responses (``data.responses``); if present, training samples none."""
        if self.responses is not None:
            self._train = [reader.read_training(data.responses, responses=self.responses)]
        else:
            self._train = reader.read_sets(used) if used else [reader.read_training(data.train)]
        self.report = reader.take_report()
        self._mixture = Mixture([one.weight for one in used]) if used else None
        held_out = [("", reader.read(data.evaluation))] if data.evaluation else []
        held_out += [(one.name, reader.read(one.files, one)) for one in config.evaluation.sets]
        firsts = accumulate((len(stored) for _, stored in held_out), initial=0)
        self.evaluation_sets = tuple(
            HeldOutSource(name, first, len(stored), _set_digest(stored))
            for (name, stored), first in zip(held_out, firsts, strict=False)
        )
        """``data.evaluation`` first, then ``evaluation.sets``."""
        self._evaluation = [one for _, stored in held_out for one in stored]
        self.evaluation_report = reader.take_report()
        sizes = [len(stored) for stored in self._train]
        settings: list[Any] = [self._seed, self._shuffle, sum(sizes), tokenizer.digest]
        if self._easy_first:
            settings.append(data.curriculum)
        if used:
            settings += [[one.weight, size] for one, size in zip(used, sizes, strict=True)]
        hasher = hashlib.sha256(json.dumps(settings).encode())
        recorded = self.responses.stored() if self.responses is not None else ()
        for stored in (*chain.from_iterable(self._train), *self._evaluation, *recorded):
            hasher.update(stored)
        self.digest = hasher.hexdigest()
        """SHA-256 of every prompt as sampled (thus of files, template and limits), seed and order."""
        self.verifiers = frozenset(reader.verifiers)
        """Verifiers named by lines or the configuration; all are registered or configured."""

    @property
    def num_prompts(self) -> int:
        """Training prompts per epoch, over all sets."""
        return sum(map(len, self._train))

    @property
    def num_evaluation_prompts(self) -> int:
        return len(self._evaluation)

    def at(self, position: int) -> Prompt:
        """Return the training prompt at a position. Raises IndexError below 0."""
        if position < 0:
            raise IndexError(f"position {position} is before the first prompt")
        number, place = self._mixture.at(position) if self._mixture else (0, position)
        stored = self._train[number]
        epoch, index = divmod(place, len(stored))
        if self._shuffle:
            num_stages = _STAGES if self._easy_first else 1
            seed = self._seed + number * _SET_SEEDS
            index = permuted_by_stages(index, len(stored), num_stages=num_stages, seed=seed, epoch=epoch)
        return _prompt(stored[index])

    def evaluation_at(self, index: int) -> Prompt:
        """Return a held-out prompt, ordered by set and file. Raises IndexError outside."""
        if not 0 <= index < len(self._evaluation):
            raise IndexError(f"evaluation prompt {index} is outside the {len(self._evaluation)} held-out prompts")
        return _prompt(self._evaluation[index])

    def overlap(self) -> list[tuple[str, str]]:
        """Return (held-out id, training id) for each held-out prompt that is also a training
        prompt, in file order. Prompts are equal if their texts differ at most in white space."""
        held_out = [(prompt.prompt_id, _without_spacing(prompt.text)) for prompt in map(_prompt, self._evaluation)]
        wanted = {essence for _, essence in held_out}
        trained: dict[str, str] = {}
        for prompt in map(_prompt, chain.from_iterable(self._train) if wanted else ()):
            if (essence := _without_spacing(prompt.text)) in wanted:
                trained.setdefault(essence, prompt.prompt_id)
        return [(prompt_id, trained[essence]) for prompt_id, essence in held_out if essence in trained]


class _Reader:
    """Reads files into stored prompts, all under the same rules."""

    def __init__(self, tokenizer: TextTokenizer, config: RunConfig) -> None:
        self._tokenizer = tokenizer
        self._data = config.data
        self._report = DataReport()
        self._seen: dict[str, str] = {}
        self._repeats: dict[str, int] = {}
        self._configured = config.verifier_paths
        # reward models re-render the conversation, and guided prompts wrap its question
        self._keep_messages = config.reward.model is not None or config.needs_guidance or config.has_environment
        self._has_environment = config.has_environment
        self.verifiers = {config.data.verifier}

    def take_report(self) -> DataReport:
        """Return the report since the last call."""
        report, self._report, self._seen = self._report, DataReport(), {}
        return report

    def read_sets(self, sets: Sequence[DataSetSection]) -> list[list[bytes]]:
        return [self.read_training(one.train, one) for one in sets]

    def read_training(
        self,
        paths: Iterable[Path | str],
        of: DataSetSection | None = None,
        *,
        responses: RecordedResponses | None = None,
    ) -> list[bytes]:
        """Return the files' prompts within the limits of difficulty, sorted if there is a
        curriculum. ``responses`` stores each line's recorded response."""
        stored = self.read(paths, of, with_difficulty=self._data.reads_difficulty, responses=responses)
        if self._data.curriculum == "easy-first":
            stored.sort(key=lambda held: _decode(held).extra[DIFFICULTY])
        return stored

    def read(
        self,
        paths: Iterable[Path | str],
        of: DataSetSection | EvaluationSetSection | None = None,
        *,
        with_difficulty: bool = False,
        responses: RecordedResponses | None = None,
    ) -> list[bytes]:
        """Return the files' prompts. A set's name is prefixed to their ids. Recorded responses may
        share the id of their question; each gets its own."""
        stored: list[bytes] = []
        report, files = self._report, named_files(paths)
        form = PromptForm.of(self._tokenizer, self._data, of)
        mapped = (of and of.columns) or self._data.columns
        verifier = (of and of.verifier) or (self._data.response_verifier if responses else self._data.verifier)
        self.verifiers.add(verifier)
        for path, label in _labelled(map(local_file, files), prefix=f"{of.name}/" if of else ""):
            columns = ColumnMap(mapped, f"columns of the set {of.name}" if of and of.columns else "data.columns")
            for row in read_rows(path):
                where = f"{path}:{row.line}"
                if isinstance(row, BadRow):
                    report.skip(SkipReason(row.problem.value), where, row.detail)
                    continue
                taken = responses.read_line(row.columns, where) if responses else None
                if isinstance(taken, Unusable):
                    report.skip(taken.reason, where, taken.detail)
                    continue
                own = columns.own(taken.columns if taken else row.columns)
                if self._has_environment:
                    # an environment takes columns by their names, also the one that holds the question
                    own = {name: value for name, value in row.columns.items() if name != "prompt"} | own
                line = parse_line(own, verifier, is_for_environment=self._has_environment)
                if with_difficulty and isinstance(line, PromptLine):
                    line = self._if_in_range(line)
                if of and isinstance(line, PromptLine) and line.id:
                    line = replace(line, id=f"{of.name}/{line.id}")
                if taken and isinstance(line, PromptLine) and line.id:
                    line = replace(line, id=self._unused_id(line.id))
                prompt = self._prompt(line, form, verifier, f"{label}:{row.line}", where)
                if isinstance(prompt, Unusable):
                    report.skip(prompt.reason, where, prompt.detail)
                elif prompt.verifier == RECORDED and not taken:
                    raise ConfigError(
                        f"{where}: the verifier is {RECORDED}, which reads verdicts of data.responses, but responses to this "
                        "prompt are sampled; name a verifier that judges them"
                    )
                elif prompt.prompt_id in self._seen:
                    detail = f"id {prompt.prompt_id!r} is already used by {self._seen[prompt.prompt_id]}; the first one is kept"
                    report.skip(SkipReason.DUPLICATE_ID, where, detail)
                elif taken and responses and (refused := responses.store(taken, prompt.prompt_id, where)):
                    report.skip(refused.reason, where, refused.detail)
                else:
                    self._seen[prompt.prompt_id] = where
                    stored.append(_encode(prompt))
                    report.count_prompt(len(prompt.tokens) // 4)
            if responses:
                responses.check()
            columns.check(path)
        if not stored:
            raise DataError(f"no usable prompt in {', '.join(map(str, files))}:\n" + "\n".join(report.lines()))
        return stored

    def _unused_id(self, given: str) -> str:
        name = given
        while name in self._seen:
            self._repeats[given] = number = self._repeats.get(given, 1) + 1
            name = f"{given}#{number}"
        return name

    def _if_in_range(self, line: PromptLine) -> PromptLine | Unusable:
        """Return the line if its difficulty is within the limits, else why not."""
        value, low, high = line.extra.get(DIFFICULTY), self._data.min_difficulty, self._data.max_difficulty
        if value is None:
            detail = (
                "no difficulty, which data.curriculum and the limits need; name its column in data.columns.difficulty"
            )
            return Unusable(SkipReason.MISSING_FIELD, detail)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return Unusable(SkipReason.WRONG_TYPE, f"difficulty is {value!r:.40}; expected a number")
        if (low is not None and value < low) or (high is not None and value > high):
            return Unusable(SkipReason.OUT_OF_RANGE, f"difficulty is {value:g}; the limits are {low} and {high}")
        return line

    def _prompt(
        self, line: PromptLine | Unusable, form: PromptForm, default_verifier: str, default_id: str, where: str
    ) -> _PromptRecord | Unusable:
        if isinstance(line, Unusable):
            return line
        verifier = line.verifier or default_verifier
        extra = line.extra
        if verifier not in self.verifiers:
            try:
                resolve_named(verifier, self._configured)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
            self.verifiers.add(verifier)
        if not line.prompt:
            # its environment asks the question
            return _PromptRecord(line.id or default_id, b"", "", line.answer, verifier, extra)
        try:
            rendered = form.render(line.prompt)
        except DataError as error:
            return Unusable(SkipReason.BAD_TEMPLATE, str(error))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        tokens = rendered.tokens
        messages = rendered.messages
        if messages is None and self._has_environment:
            messages = [{"role": "user", "content": line.prompt}]
        if self._keep_messages and messages is not None:
            extra = {**extra, MESSAGES: messages}
            if form.variables:
                extra[CHAT_VARIABLES] = form.variables
        if len(line.answer) > self._data.max_answer_chars:
            detail = f"{len(line.answer)} characters; data.max_answer_chars is {self._data.max_answer_chars}"
            return Unusable(SkipReason.OVERLONG_ANSWER, detail)
        if not tokens:
            return Unusable(SkipReason.EMPTY_PROMPT, "the prompt has no tokens")
        if len(tokens) > self._data.max_prompt_tokens:
            detail = f"{len(tokens)} tokens; data.max_prompt_tokens is {self._data.max_prompt_tokens}"
            return Unusable(SkipReason.OVERLONG, detail)
        packed = np.asarray(tokens, dtype="<i4").tobytes()
        self._report.count_form(rendered.form)
        return _PromptRecord(line.id or default_id, packed, rendered.text, line.answer, verifier, extra)


def _labelled(paths: Iterable[Path], prefix: str = "") -> list[tuple[Path, str]]:
    """Label each file by its stem, numbering repeated stems, so that prompt ids stay unique."""
    labelled: list[tuple[Path, str]] = []
    taken: dict[str, int] = {}
    for path in paths:
        count = taken[path.stem] = taken.get(path.stem, 0) + 1
        label = path.stem if count == 1 else f"{path.stem}#{count}"
        labelled.append((path, prefix + label))
    return labelled


def _set_digest(stored: Sequence[bytes]) -> str:
    hasher = hashlib.sha256()
    for row in map(_decode, stored):
        hasher.update(json.dumps([row.text, row.answer, row.verifier]).encode())
    return hasher.hexdigest()[:32]


def _without_spacing(text: str) -> str:
    return " ".join(text.split())


def _prompt(stored: bytes) -> Prompt:
    row = _decode(stored)
    return Prompt(
        prompt_id=row.prompt_id,
        tokens=np.frombuffer(row.tokens, dtype="<i4"),
        text=row.text,
        answer=row.answer,
        verifier=row.verifier,
        extra=row.extra,
    )
