"""A run's history, samples and logs as the page shows them, read from its files.

Everything here blocks and is bounded: of a long history, evenly chosen updates are returned; of a long
log, the last lines. Text of models, prompts and logs is made printable, so that nothing in it acts on a
terminal or runs backwards; the page shows it as text.

The model's own tokenizer splits text into tokens, so that they can be coloured one by one. It is loaded
once per model folder, when answers are first shown."""

from __future__ import annotations

import tomllib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from pipeline.config import RESOLVED_NAME
from pipeline.ledger.types import Audit
from pipeline.observability.history import (
    HISTORY_NAME,
    VALUE_HISTORY_NAME,
    EvaluationRow,
    HistoryTail,
    UpdateRow,
    ValueRow,
    columns,
)
from pipeline.observability.log_lines import LEVELS, LogReader
from pipeline.observability.samples import SAMPLES_NAME, TRAINED, ResponseSample, TokenDetail, response_samples
from protocol.errors import ConfigError, DataError
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from pipeline.data.tokenizer import TextTokenizer

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


class HistoryFigures:
    """Reads histories as they grow. Not safe for concurrent calls."""

    def __init__(self) -> None:
        self._tails: OrderedDict[Path, tuple[HistoryTail, HistoryTail]] = OrderedDict()

    def read(self, run_dir: Path) -> dict[str, Any]:
        """Return a run's curves: columns of updates and value steps, and evaluations."""
        tails = self._tails.pop(run_dir, None)
        if tails is None:
            tails = HistoryTail(run_dir / HISTORY_NAME), HistoryTail(run_dir / VALUE_HISTORY_NAME)
        self._tails[run_dir] = tails
        while len(self._tails) > _MAX_TAILS:
            self._tails.popitem(last=False)
        rows, steps = (tail.read() for tail in tails)
        updates = [row for row in rows if isinstance(row, UpdateRow)]
        evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
        return history_figures(updates, evaluations, [row for row in steps if isinstance(row, ValueRow)])


def history_figures(
    updates: Sequence[UpdateRow],
    evaluations: Sequence[EvaluationRow],
    values: Sequence[ValueRow],
    *,
    most: int = MAX_ROWS,
) -> dict[str, Any]:
    """Return a run's curves, at most ``most`` rows of each kind. ``tokens`` and ``time_s`` are what the
    run had trained and spent by then."""
    tokens = list(accumulate((row.num_trained_tokens for row in updates), initial=0))
    time_s = list(accumulate((row.seconds for row in updates), initial=0.0))
    places = {row.policy_version: place for place, row in enumerate(updates, 1)}
    shown = evenly(range(1, len(updates) + 1), most)
    rows: list[dict[str, Any]] = []
    for row in evenly(evaluations, most):
        place = places.get(row.policy_version, 0)
        when = {"update": updates[place - 1].update if place else 0, "tokens": tokens[place], "time_s": time_s[place]}
        rows.append({**msgspec.structs.asdict(row), "set_name": printable_line(row.set_name), **when})
    return {
        "num_updates": len(updates),
        "updates": columns((updates[place - 1] for place in shown), "update")
        | {"tokens": [tokens[place] for place in shown], "time_s": [time_s[place] for place in shown]},
        "histograms": updates[-1].histograms if updates else {},
        "evaluations": rows,
        "values": columns(evenly(values, most), "value"),
    }


def balance_figures(audit: Audit) -> dict[str, Any]:
    """Return both sides of the conservation law, as the page shows them."""
    names = ("groups", "trajectories", "tokens", *(("finished",) if audit.finished.admitted else ()))
    balances = {name: getattr(audit, name) for name in names}
    return {
        "balances": audit.balances,
        "columns": {name: {**asdict(one), "difference": one.difference} for name, one in balances.items()},
        "num_unflushed": audit.num_unflushed,
    }


def encoded(value: object) -> bytes:
    """Encode a value as JSON; NaN and infinity become null, paths become text."""
    return msgspec.json.encode(value, enc_hook=str)


def names_in_words(names: Collection[str]) -> str:
    """List names for a message about one that is unknown."""
    shown = sorted(names)[:20]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return (", ".join(shown) or "none") + more


def history_stamp(run_dir: Path) -> list[int]:
    """Return numbers that change whenever the run's history or samples do."""
    return [_size(run_dir / name) for name in (HISTORY_NAME, VALUE_HISTORY_NAME, SAMPLES_NAME)]


def sample_figures(run_dir: Path, *, last: int, before: int | None = None) -> dict[str, Any]:
    """Return the samples of the ``last`` newest updates, newest first; only updates below ``before``."""
    found = [row for row in response_samples(run_dir).read()[0] if before is None or row.update < before]
    updates = sorted({row.update for row in found})
    kept = set(updates[-last:])
    return {
        "samples": shown_samples(run_dir, (row for row in reversed(found) if row.update in kept)),
        "oldest": min(kept, default=None),
        "num_older": len(updates) - len(kept),
    }


def shown_samples(run_dir: Path, rows: Iterable[ResponseSample]) -> list[dict[str, Any]]:
    """Return samples with the text of each token, if the model's tokenizer can be read."""
    text = TokenText(_model_of(run_dir))
    return [_sample(row, text) for row in rows]


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


def _model_of(run_dir: Path) -> Path | None:
    try:
        settings = tomllib.loads((run_dir / RESOLVED_NAME).read_text(encoding="utf-8"))
        return Path(str(settings["model"]["path"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    return {**msgspec.structs.asdict(row), **texts, **names, **shown, "tokens": tokens, "tokens_missing": missing}


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
        "turns": [(place, printable(words)) for place, words in tokens.turns],
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


_UNFINISHED = "\ufffd"


class TokenText:
    """The text of single tokens; None as the model if it is unknown."""

    def __init__(self, model: Path | None) -> None:
        self._model = model

    def pieces(self, ids: Sequence[int], cuts: Sequence[tuple[int, int]]) -> list[str]:
        """Return the text of each token. If several tokens form one character, the last of them has its
        text and the others are empty. Raises DataError if there is no tokenizer."""
        if self._model is None:
            raise DataError("tokens are not shown one by one: the run's config.toml names no model that can be read")
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
    from pipeline.data.tokenizer import load_text_tokenizer

    try:
        return load_text_tokenizer(model)
    except DataError as error:
        raise DataError(f"tokens are not shown one by one: {error}") from error
