"""Recorded responses: reads responses, verdicts and judgments from files.

Columns that need no mapping, recognised by name:

    response       response, completion or output: a text, or the assistant's message; or messages
                   that end with the assistant's
    verdict        verdict, correct, is_correct or accuracy; or label, where it is true or false
    judgment       judgment: what is wrong with the response, in words; optional
    finish_reason  ``length`` for a response that was cut; it gets no stop token. Optional

The first three can be mapped in ``[data.columns]``. A line without a response or a verdict is
reported and skipped. If no line of a file has one, the file is an error.

A response is tokenised by the run's tokenizer and ends with the token that ends the assistant's
turn in the chat template; without a template with the end-of-sequence token, or the first of
``generation.stop_token_ids``. A response that already ends with a token at which sampling stops
keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.columns import listed, plain_text, value_at
from pipeline.data.end_tokens import end_tokens
from pipeline.data.lines import Unusable
from pipeline.data.report import SkipReason
from pipeline.data.tokenizer import TextTokenizer
from pipeline.rewards.recorded import FORMS, VERDICT, verdict_of
from pipeline.rewards.registry import RECORDED
from protocol.errors import DataError
from protocol.trajectory import FinishReason

JUDGMENT: Final = "judgment"
"""Key of the judgment in a prompt's ``extra``."""
_RESPONSES: Final = ("response", "completion", "output")
_VERDICTS: Final = (VERDICT, "correct", "is_correct", "accuracy")
_KTO_LABEL: Final = "label"


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """A response read from a file instead of being sampled."""

    tokens: np.ndarray
    """int32 [response tokens], including the stop token"""
    finish_reason: FinishReason
    """STOP, or LENGTH for a response that was cut."""


@dataclass(frozen=True, slots=True)
class ResponseLine:
    """The response of a line, separated from the columns of its prompt."""

    columns: Mapping[str, Any]
    """The other columns, for ``ColumnMap``; the verdict as 0 or 1, and the judgment as text."""
    text: str
    is_cut: bool
    verdict: bool | None


class _StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    tokens: bytes
    """int32, little-endian"""
    finish_reason: FinishReason


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_StoredResponse).decode


class RecordedResponses:
    """All recorded responses of a run, by prompt id."""

    def __init__(self, config: RunConfig, tokenizer: TextTokenizer) -> None:
        self._columns = config.data.columns
        self._needs_verdict = config.data.response_verifier == RECORDED
        self._limit = config.generation.max_response_tokens
        self._stop_strings = config.generation.stop_strings
        self._tokenizer = tokenizer
        configured = config.generation.stop_token_ids
        self._ends = frozenset(end_tokens(config.model.path, tokenizer, configured))
        stops = [tokenizer.turn_end_id, tokenizer.eos_token_id, *configured, *sorted(self._ends)]
        self._stop = next((token for token in stops if token is not None), None)
        self._stored: dict[str, bytes] = {}
        self._seen: set[str] = set()
        self._first: tuple[str, Mapping[str, Any]] | None = None
        self._num_right = self._num_wrong = self._num_judgments = self._longest = 0
        self._changed: list[str] = []

    def at(self, prompt_id: str) -> RecordedResponse:
        """Return the response to a prompt. Raises KeyError for a prompt of other files."""
        stored = _decode(self._stored[prompt_id])
        return RecordedResponse(np.frombuffer(stored.tokens, dtype="<i4"), stored.finish_reason)

    def stored(self) -> Iterator[bytes]:
        """Yield every encoded response in file order, for a digest."""
        return iter(self._stored.values())

    def read_line(self, columns: Mapping[str, Any], where: str) -> ResponseLine | Unusable:
        """Read a line's response, verdict and judgment. ``where`` is ``file:line``."""
        self._first = self._first or (where, columns)
        rest = {name: value for name, value in columns.items() if value is not None}
        text = self._text(rest)
        if text is not None:
            self._seen.add("response")
        written, name = self._verdict(rest)
        if name is not None:
            self._seen.add(VERDICT)
        verdict = verdict_of(written)
        if text is None:
            return Unusable(SkipReason.MISSING_FIELD, f"no response; the line has {listed(columns)}")
        if not isinstance(text, str):
            return Unusable(SkipReason.WRONG_TYPE, f"the response is a {type(text).__name__}; expected text")
        if not text.strip():
            return Unusable(SkipReason.EMPTY_RESPONSE, "the response is empty")
        if verdict is None and self._needs_verdict:
            if name is None:
                return Unusable(SkipReason.MISSING_FIELD, f"no verdict; the line has {listed(columns)}")
            return Unusable(SkipReason.WRONG_TYPE, f"{name} is {written!r:.40}; expected {FORMS}")
        judgment = value_at(rest, self._columns.judgment or JUDGMENT)
        if judgment is not None and not isinstance(judgment, str):
            return Unusable(SkipReason.WRONG_TYPE, f"the judgment is a {type(judgment).__name__}; expected text")
        for key in filter(None, (name, self._columns.judgment, VERDICT, JUDGMENT)):
            rest.pop(key, None)
        if self._needs_verdict:
            rest.pop("verifier", None)
        if verdict is not None:
            rest[VERDICT] = int(verdict)
        if judgment and judgment.strip():
            rest[JUDGMENT] = judgment.strip()
        return ResponseLine(rest, text, rest.pop("finish_reason", None) == FinishReason.LENGTH, verdict)

    def store(self, line: ResponseLine, prompt_id: str, where: str) -> Unusable | None:
        """Tokenise a line's response and store it under its prompt's id, or return why not. Raises
        DataError if the model has no stop token."""
        tokens, reason = self._tokenizer.encode(line.text, add_special_tokens=False), FinishReason.STOP
        # a template writes a line end after the turn, which no model samples
        trimmed = self._tokenizer.encode(line.text.rstrip(), add_special_tokens=False)
        if trimmed and trimmed[-1] in self._ends:
            tokens = trimmed
        if line.is_cut:
            reason = FinishReason.LENGTH
        elif not line.text.endswith(self._stop_strings or ("\0",)) and self._ends.isdisjoint(tokens[-1:]):
            tokens.append(self._stop_token())
        if len(tokens) > self._limit:
            detail = f"{len(tokens)} tokens; generation.max_response_tokens is {self._limit}"
            return Unusable(SkipReason.OVERLONG_RESPONSE, detail)
        if self._tokenizer.decode(tokens).split() != line.text.split():
            self._changed.append(where)
        self._stored[prompt_id] = _encode(_StoredResponse(np.asarray(tokens, dtype="<i4").tobytes(), reason))
        self._longest = max(self._longest, len(tokens))
        self._num_right += line.verdict is True
        self._num_wrong += line.verdict is False
        self._num_judgments += JUDGMENT in line.columns
        return None

    def check(self) -> None:
        """Raise DataError if no line since the last call had a response, or none had a verdict."""
        first, seen, self._first, self._seen = self._first, self._seen, None, set[str]()
        needed = {"response": _RESPONSES} | ({VERDICT: _VERDICTS} if self._needs_verdict else {})
        for what, names in needed.items():
            if first is not None and what not in seen:
                where, columns = first
                judged = ", or set data.response_verifier to judge the responses" if what == VERDICT else ""
                raise DataError(
                    f"{where}: no {what}, and no line of the file has one; the line has {listed(columns)}; expected "
                    f"{' or '.join(names)}: add the column, name it in data.columns.{what}{judged}"
                )

    def lines(self) -> list[str]:
        said = f"{len(self._stored)} responses"
        if self._num_right or self._num_wrong:
            said += f": {self._num_right} right, {self._num_wrong} wrong, {self._num_judgments} with a judgment"
        lines = [f"{said}; the longest has {self._longest} tokens"]
        if self._changed:
            lines.append(
                f"{len(self._changed)} responses change when tokenised and decoded, first {self._changed[0]}: the "
                "tokenizer lacks or changes some of their characters"
            )
        return lines

    def _text(self, rest: dict[str, Any]) -> Any:
        """Remove the response from a row and return it, or None."""
        mapped = self._columns.response
        name = mapped or next((name for name in _RESPONSES if name in rest), None)
        if name is not None:
            value = plain_text(value_at(rest, name))
            rest.pop(name, None)
            return value
        messages: Any = rest.get("messages")
        last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            rest["messages"] = messages[:-1]
            return last.get("content")
        return None

    def _verdict(self, rest: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Return the verdict as written and its column's name, or None and None."""
        if self._columns.verdict is not None:
            value = value_at(rest, self._columns.verdict)
            return value, None if value is None else self._columns.verdict
        if (name := next((name for name in _VERDICTS if name in rest), None)) is not None:
            return rest[name], name
        if isinstance(rest.get(_KTO_LABEL), bool):
            return rest[_KTO_LABEL], _KTO_LABEL
        return None, None

    def _stop_token(self) -> int:
        if self._stop is None:
            raise DataError(
                "tokenizer, model and chat template name no end token, so no response could end; set "
                "generation.stop_token_ids"
            )
        return self._stop
