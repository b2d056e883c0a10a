"""Data for the web page from a run's files: history, samples, logs.

Everything here blocks and is bounded: of a long history, evenly chosen updates are returned; of a long
log, the last lines. Text of models, prompts and logs is made printable, so that nothing in it acts on a
terminal or runs backwards; the page shows it as text.

The model's own tokenizer splits text into tokens, so that they can be coloured one by one. It is loaded
once per model folder, when answers are first shown."""

from __future__ import annotations

import tomllib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

from pipeline.config import RESOLVED_NAME
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.observability.history import (
    HISTORY_NAME,
    VALUE_HISTORY_NAME,
    EvaluationRow,
    HistoryTail,
    Row,
    UpdateRow,
    ValueRow,
    columns,
)
from pipeline.observability.log_lines import LEVELS, LogReader
from pipeline.observability.samples import SAMPLES_NAME, TRAINED, ResponseSample, TokenDetail, read_samples
from pipeline.operator.web.guard import names_in_words
from protocol.errors import ConfigError, DataError
from protocol.printable import printable, printable_line

MAX_ROWS: Final = 600
"""Maximum rows of one kind sent to a page; a curve shows no more points on a screen."""
_MAX_TAILS: Final = 8
"""Number of runs whose histories are kept in memory."""
_MAX_LINES: Final = 500
_LOG_BYTES: Final = 256 << 10
"""Bytes read from the end of one worker's log."""
_MAX_LOGS: Final = 256
_LOGS_BYTES: Final = 4 << 20
"""Bytes read from all workers' logs together; the most recently written come first."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Tails:
    updates: HistoryTail
    values: HistoryTail


class HistoryFigures:
    """Reads histories as they grow. Not safe for concurrent calls."""

    def __init__(self) -> None:
        self._tails: OrderedDict[Path, _Tails] = OrderedDict()

    def read(self, run_dir: Path) -> dict[str, Any]:
        """Return a run's curves: columns of updates and value steps, and evaluations."""
        tails = self._tails.pop(run_dir, None)
        if tails is None:
            tails = _Tails(HistoryTail(run_dir / HISTORY_NAME), HistoryTail(run_dir / VALUE_HISTORY_NAME))
        self._tails[run_dir] = tails
        while len(self._tails) > _MAX_TAILS:
            self._tails.popitem(last=False)
        rows, steps = tails.updates.read(), tails.values.read()
        updates = [row for row in rows if isinstance(row, UpdateRow)]
        evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
        return {
            "num_updates": len(updates),
            "updates": columns(evenly(updates, MAX_ROWS), "update"),
            "histograms": updates[-1].histograms if updates else {},
            "evaluations": [
                {**asdict(row), "set_name": printable_line(row.set_name), "update": update}
                for row, update in _with_updates(evenly(evaluations, MAX_ROWS), updates)
            ],
            "values": columns(evenly([row for row in steps if isinstance(row, ValueRow)], MAX_ROWS), "value"),
        }


def history_stamp(run_dir: Path) -> list[int]:
    """Return numbers that change whenever the run's history or samples do."""
    return [_size(run_dir / name) for name in (HISTORY_NAME, VALUE_HISTORY_NAME, SAMPLES_NAME)]


def sample_figures(run_dir: Path, *, last: int, before: int | None = None) -> dict[str, Any]:
    """Return the samples of the ``last`` newest updates, newest first; only updates below ``before``."""
    found = [row for row in read_samples(run_dir / SAMPLES_NAME) if before is None or row.update < before]
    updates = sorted({row.update for row in found})
    kept = set(updates[-last:])
    text = TokenText(_model_of(run_dir))
    return {
        "samples": [_sample(row, text) for row in reversed(found) if row.update in kept],
        "oldest": min(kept, default=None),
        "num_older": len(updates) - len(kept),
    }


def log_figures(run_dir: Path, *, worker: str | None, level: str, last: int) -> dict[str, Any]:
    """Return the last lines of the most recently written logs. Raises ConfigError for an unknown
    worker or level."""
    if level not in LEVELS:
        raise ConfigError(f"no level {level!r}; expected {', '.join(LEVELS)}")
    names = LogReader(run_dir).newest(_MAX_LOGS) if worker is None else [worker]
    tail_bytes = min(_LOG_BYTES, _LOGS_BYTES // max(1, len(names)))
    reader = LogReader(run_dir, workers=frozenset(names), level=level, tail_bytes=tail_bytes)
    known = reader.known()
    if worker is not None and worker not in known:
        raise ConfigError(f"{run_dir.name} has no log of {worker!r}; it has those of: {names_in_words(known)}")
    lines = reader.new(min(last, _MAX_LINES))
    rows = [
        {"at": line.at, "worker": printable_line(line.worker), "level": line.level, "text": line.shown()}
        for line in lines
    ]
    return {"lines": rows, "workers": [printable_line(name) for name in known]}


def evenly(rows: Sequence[_T], most: int) -> list[_T]:
    """Return at most ``most`` rows: the first, the last, and evenly spaced ones between."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def _with_updates(evaluations: Sequence[EvaluationRow], updates: Sequence[Row]) -> list[tuple[EvaluationRow, int]]:
    """Return evaluations with the update that published their version; 0 for the initial model."""
    made = {row.policy_version: row.update for row in updates if isinstance(row, UpdateRow)}
    return [(row, made.get(row.policy_version, 0)) for row in evaluations]


def _model_of(run_dir: Path) -> Path:
    settings = tomllib.loads((run_dir / RESOLVED_NAME).read_text(encoding="utf-8"))
    return Path(str(settings.get("model", {}).get("path", "")))


def _sample(row: ResponseSample, text: TokenText) -> dict[str, Any]:
    texts = {name: printable(getattr(row, name)) for name in ("prompt", "answer", "response")}
    names = {name: printable_line(getattr(row, name)) for name in ("verifier", "trajectory", "finish_reason")}
    parts = {printable_line(name): value for name, value in row.parts.items()}
    tokens = None
    missing = "no tokens were recorded" if row.kind == TRAINED else "not trained on, so its tokens are not recorded"
    if row.tokens is not None:
        try:
            tokens, missing = _token_figures(row.tokens, text), ""
        except DataError as error:
            missing = printable_line(str(error))
    shown = {"parts": parts, "verdict": row.verdict, "facts": printable_line(row.facts)}
    return {**asdict(row), **texts, **names, **shown, "tokens": tokens, "tokens_missing": missing}


def _token_figures(tokens: TokenDetail, text: TokenText) -> dict[str, Any]:
    number = len(tokens.ids)
    versions = [version for version, many in tokens.segments for _ in range(many)]
    advantages = tokens.advantages * number if len(tokens.advantages) == 1 else tokens.advantages
    return {
        "pieces": [printable(piece) for piece in text.pieces(tokens.ids, tokens.cuts)],
        "versions": versions[:number],
        "logprobs": tokens.logprobs,
        "advantages": advantages or None,
        "cuts": tokens.cuts,
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


_UNFINISHED = "\ufffd"


class TokenText:
    def __init__(self, model: Path) -> None:
        self._model = model

    def pieces(self, ids: Sequence[int], cuts: Sequence[tuple[int, int]]) -> list[str]:
        """Return the text of each token. If several tokens form one character, the last of them has its
        text and the others are empty. Raises DataError if there is no tokenizer."""
        tokenizer = _tokenizer(self._model)

        def decode(some: Sequence[int]) -> str:
            return tokenizer.decode(some, skip_special_tokens=False)

        places = [0, *(place for place, _ in cuts if 0 < place < len(ids)), len(ids)]
        found: list[str] = []
        for begin, end in pairwise(places):
            found += split_text(decode, ids[begin:end])
        return found


def split_text(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. It may depend on the token before, so each token is decoded
    together with the last one that completed a character."""
    found: list[str] = []
    context = done = 0
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[context:done]), decode(ids[context:end])
        if now.endswith(_UNFINISHED) and end < len(ids):
            found.append("")
            continue
        found.append(now[len(before) :])
        context, done = done, end
    return found


@lru_cache(maxsize=4)
def _tokenizer(model: Path) -> TextTokenizer:
    try:
        return load_text_tokenizer(model)
    except DataError as error:
        raise DataError(f"tokens are not shown one by one: {error}") from error
