"""The stream of prompts: a position in, a prompt out.

Files are read once, when the source is loaded. All workers of a run must share its digest.

``at(position)`` is a pure function: the epoch is ``position // num_prompts``, and each epoch has
its own seeded order. A position gives the same prompt in every process and after every restart. The
ledger therefore keeps only a group's number.

Prompts are held as MessagePack, about the size of the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.columns import ColumnMap
from pipeline.data.conversation import MESSAGES
from pipeline.data.files import BadRow, read_rows
from pipeline.data.lines import PromptLine, Unusable, parse_line
from pipeline.data.permutation import permuted
from pipeline.data.report import DataReport, SkipReason
from pipeline.data.tokenizer import TextTokenizer
from pipeline.rewards.registry import resolve, resolve_named
from protocol.errors import ConfigError, DataError
from protocol.trajectory import Prompt

_HOLE = "{prompt}"


class _PromptRecord(msgspec.Struct, frozen=True, array_like=True):
    """A prompt at rest."""

    prompt_id: str
    tokens: bytes
    """int32, little-endian"""
    text: str
    answer: str
    verifier: str
    extra: dict[str, Any]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_PromptRecord).decode


class PromptSource:
    """Training and evaluation prompts of a run."""

    def __init__(self, config: RunConfig, tokenizer: TextTokenizer) -> None:
        """Read all prompt files of a configuration. Raises DataError: a file is missing or
        unreadable, or no line of the training or of the evaluation files is usable. Raises
        ConfigError: the template has no place for the prompt, or a verifier does not exist."""
        data = config.data
        if _HOLE not in data.prompt_template:
            raise ConfigError(f"data.prompt_template is {data.prompt_template!r}; it must contain {_HOLE}")
        resolve(data.verifier)
        reader = _Reader(tokenizer, config)
        self._seed, self._shuffle = config.run.seed, data.shuffle
        self._train, self.report = reader.read(data.train)
        self._evaluation, self.evaluation_report = [], DataReport()
        if data.evaluation:
            self._evaluation, self.evaluation_report = reader.read(data.evaluation)
        settings = [self._seed, self._shuffle, len(self._train), tokenizer.digest]
        hasher = hashlib.sha256(json.dumps(settings).encode())
        for stored in (*self._train, *self._evaluation):
            hasher.update(stored)
        self.digest = hasher.hexdigest()
        """SHA-256 of every prompt as it is sampled (so of files, template, limits), seed, order."""
        self.verifiers = frozenset(reader.verifiers)
        """Verifiers that lines or the configuration name; each is registered or configured."""

    @property
    def num_prompts(self) -> int:
        """Training prompts of one epoch."""
        return len(self._train)

    @property
    def num_evaluation_prompts(self) -> int:
        """Held-out prompts."""
        return len(self._evaluation)

    def at(self, position: int) -> Prompt:
        """Return the training prompt at a position of the stream. Raises IndexError below 0."""
        if position < 0:
            raise IndexError(f"position {position} is before the first prompt")
        epoch, index = divmod(position, len(self._train))
        if self._shuffle:
            index = permuted(index, len(self._train), seed=self._seed, epoch=epoch)
        return _prompt(self._train[index])

    def evaluation_at(self, index: int) -> Prompt:
        """Return a held-out prompt, in the files' order. Raises IndexError outside of them."""
        if not 0 <= index < len(self._evaluation):
            raise IndexError(f"evaluation prompt {index} is outside the {len(self._evaluation)} held-out prompts")
        return _prompt(self._evaluation[index])

    def overlap(self) -> list[tuple[str, str]]:
        """Return, by file order, the id of each held-out prompt that is a training prompt too, with
        the first such one's. Two prompts are the same when their sampled texts differ at most in
        white space."""
        held_out = [(prompt.prompt_id, _essence(prompt.text)) for prompt in map(_prompt, self._evaluation)]
        wanted = {essence for _, essence in held_out}
        trained: dict[str, str] = {}
        for prompt in map(_prompt, self._train if wanted else ()):
            if (essence := _essence(prompt.text)) in wanted:
                trained.setdefault(essence, prompt.prompt_id)
        return [(prompt_id, trained[essence]) for prompt_id, essence in held_out if essence in trained]


class _Reader:
    """Reads files into stored prompts under one set of rules."""

    def __init__(self, tokenizer: TextTokenizer, config: RunConfig) -> None:
        self._tokenizer = tokenizer
        self._data = config.data
        self._configured = config.verifier_paths
        self._keep_messages = config.reward.model is not None
        self.verifiers = {config.data.verifier}

    def read(self, paths: Iterable[Path]) -> tuple[list[bytes], DataReport]:
        stored: list[bytes] = []
        seen: dict[str, str] = {}
        report = DataReport()
        for path, label in _labelled(paths):
            columns = ColumnMap(self._data.columns)
            for row in read_rows(path):
                where = f"{path}:{row.line}"
                if isinstance(row, BadRow):
                    report.skip(SkipReason(row.problem.value), where, row.detail)
                    continue
                prompt = self._prompt(
                    parse_line(columns.own(row.columns), self._data.verifier), f"{label}:{row.line}", where
                )
                if isinstance(prompt, Unusable):
                    report.skip(prompt.reason, where, prompt.detail)
                elif prompt.prompt_id in seen:
                    detail = f"id {prompt.prompt_id!r} is that of {seen[prompt.prompt_id]}; the first one is kept"
                    report.skip(SkipReason.DUPLICATE_ID, where, detail)
                else:
                    seen[prompt.prompt_id] = where
                    stored.append(_encode(prompt))
                    report.keep(len(prompt.tokens) // 4)
            columns.check(path)
        if not stored:
            raise DataError(f"no usable prompt in {', '.join(map(str, paths))}:\n" + "\n".join(report.lines()))
        return stored, report

    def _prompt(self, line: PromptLine | Unusable, default_id: str, where: str) -> _PromptRecord | Unusable:
        if isinstance(line, Unusable):
            return line
        verifier = line.verifier or self._data.verifier
        extra = line.extra
        if verifier not in self.verifiers:
            try:
                resolve_named(verifier, self._configured)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
            self.verifiers.add(verifier)
        if isinstance(line.prompt, str):
            text = self._data.prompt_template.replace(_HOLE, line.prompt)
            tokens = self._tokenizer.encode(text)
        else:
            try:
                text, tokens = self._tokenizer.render_chat(line.prompt)
            except DataError as error:
                return Unusable(SkipReason.BAD_TEMPLATE, str(error))
            if self._keep_messages:
                extra = {**extra, MESSAGES: line.prompt}
        if len(line.answer) > self._data.max_answer_chars:
            detail = f"{len(line.answer)} characters; data.max_answer_chars is {self._data.max_answer_chars}"
            return Unusable(SkipReason.OVERLONG_ANSWER, detail)
        if not tokens:
            return Unusable(SkipReason.EMPTY_PROMPT, "the prompt has no tokens")
        if len(tokens) > self._data.max_prompt_tokens:
            detail = f"{len(tokens)} tokens; data.max_prompt_tokens is {self._data.max_prompt_tokens}"
            return Unusable(SkipReason.OVERLONG, detail)
        packed = np.asarray(tokens, dtype="<i4").tobytes()
        return _PromptRecord(line.id or default_id, packed, text, line.answer, verifier, extra)


def _labelled(paths: Iterable[Path]) -> list[tuple[Path, str]]:
    """Name each file by its stem; a repeated one gets a number, so that prompt ids stay
    distinct."""
    labelled: list[tuple[Path, str]] = []
    taken: dict[str, int] = {}
    for path in paths:
        count = taken[path.stem] = taken.get(path.stem, 0) + 1
        labelled.append((path, path.stem if count == 1 else f"{path.stem}#{count}"))
    return labelled


def _essence(text: str) -> str:
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
