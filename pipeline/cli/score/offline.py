"""Scoring a file of responses, to check a verifier before training with it.

*Consumes* a JSONL or Parquet file of ``response``, ``answer`` and, optionally, ``prompt``,
``verifier``, ``num_tokens``, ``finish_reason`` and further columns. *Produces* a ScoreReport:
distributions, and every kind of failure with file and line; where asked, a line of JSON for each
response. *Waits for* verifiers, each within its time limit. It is the engine of the reward worker,
with the same sandbox and the same shaping.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pipeline.cli.score.distribution import ScoreReport, ScoreTally
from pipeline.config.learning import RewardSection
from pipeline.data.files import BadRow, Row, read_rows
from pipeline.data.lines import text_of
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.registry import resolve
from pipeline.rewards.shaping import shape
from pipeline.rewards.verifier import Response, VerifierFailure, VerifierOutcome
from protocol.errors import ConfigError, DataError
from protocol.trajectory import FinishReason, RewardScore

_OWN_COLUMNS = frozenset({"response", "answer", "prompt", "verifier", "num_tokens", "finish_reason"})
_MAX_TOKENS = 1 << 31
_BATCH_A_PROCESS = 64
"""Responses that wait at once for each process, so that a slow one keeps no other process idle for
long.
"""
_FINAL = {str(reason): reason for reason in FinishReason if reason.is_final}


def score_file(
    path: Path,
    verifier: str | None = None,
    *,
    config: RewardSection | None = None,
    max_response_tokens: int | None = None,
    by: str | None = None,
    out: Path | None = None,
    on_judged: Callable[[int], None] | None = None,
) -> ScoreReport:
    """Score every response of a file and return the distribution.

    Args:
        path: ``.jsonl`` or ``.parquet``; one response a line.
        verifier: for every line; absent, each line's own ``verifier`` column decides, among
            registered ones.
        config: time limit, processes and shaping; a run's reward section, or its defaults.
        max_response_tokens: the run's limit; needed by the soft over-long punishment only.
        by: a column to break the distribution down by.
        out: a JSONL file for one object a line of ``path``: its verdict, its failure, or why it
            cannot be read.
        on_judged: is called with the number of lines that have just been dealt with.

    Raises:
        DataError: the file is missing or unreadable, or holds no response at all.
        ConfigError: the verifier does not exist or cannot be imported, or shaping needs a limit
            that is not given.
    """
    config = config or RewardSection()
    if "soft" in config.overlong and max_response_tokens is None:
        raise ConfigError("reward.overlong is soft: say max_response_tokens, the limit that the punishment leads up to")
    if verifier is not None:
        resolve(verifier)
    tally = ScoreTally(str(path), verifier, by)
    rows = read_rows(path)
    if out is not None and out.exists() and out.samefile(path):
        raise ConfigError(f"{out}: the verdicts would replace the responses; name another file")
    with ExitStack() as stack:
        file = None if out is None else stack.enter_context(out.open("wb"))
        job = _Job(verifier, config, max_response_tokens or 0, tally, file, on_judged or (lambda _: None))
        asyncio.run(job.score(rows))
    report = tally.report()
    if report.num_responses == 0:
        raise DataError(f"{path}: no response to score; {'; '.join(report.bad_lines[:3]) or 'the file is empty'}")
    return report


class _Job:
    """One file's way through the pool."""

    def __init__(
        self,
        verifier: str | None,
        config: RewardSection,
        limit: int,
        tally: ScoreTally,
        out: BinaryIO | None,
        on_judged: Callable[[int], None],
    ) -> None:
        self._verifier, self._config, self._limit = verifier, config, limit
        self._tally, self._out, self._on_judged = tally, out, on_judged

    async def score(self, rows: Iterator[Row | BadRow]) -> None:
        config, verifier = self._config, self._verifier
        configured = config.verifiers if verifier is None else (*config.verifiers, verifier)
        size = max(config.max_batch, _BATCH_A_PROCESS * config.processes)
        async with VerifierPool(config, configured=configured) as pool:
            await pool.start([] if verifier is None else [verifier])
            while batch := list(itertools.islice(rows, size)):
                read = [row.detail if isinstance(row, BadRow) else _response(row, verifier) for row in batch]
                responses = [found for found in read if not isinstance(found, str)]
                self._on_judged(len(read) - len(responses))
                outcomes = iter(await pool.score(responses, on_judged=self._on_judged))
                for row, found in zip(batch, read, strict=True):
                    if isinstance(found, str):
                        self._tally.bad_line(row.line, found)
                        self._write({"line": row.line, "unreadable": found})
                    else:
                        self._judged(row.line, found, next(outcomes))

    def _judged(self, line: int, response: Response, outcome: VerifierOutcome) -> None:
        if isinstance(outcome, VerifierFailure):
            self._tally.failure(line, response, outcome)
            told: dict[str, Any] = {"failure": outcome.kind, "error": outcome.error}
        else:
            score = shape(
                self._config,
                outcome,
                num_tokens=response.num_tokens,
                max_response_tokens=self._limit,
                finish_reason=response.finish_reason,
            )
            self._tally.score(response, score, judged=outcome.judged)
            told = _in_words(outcome.reason, outcome.judged, score)
        self._write({"line": line, "verifier": response.verifier, **told})

    def _write(self, told: dict[str, Any]) -> None:
        if self._out is not None:
            self._out.write(msgspec.json.encode(told) + b"\n")


def _in_words(reason: str, judged: bool, score: RewardScore) -> dict[str, Any]:
    return {
        "accuracy": score.accuracy,
        "reward": score.reward,
        "parts": score.parts,
        "masked": score.masked,
        "judged": judged,
        "reason": reason,
    }


def _response(row: Row, verifier: str | None) -> Response | str:
    """Read a line; a text says what is wrong with it."""
    columns = {name: value for name, value in row.columns.items() if value is not None}
    text, answer, name = columns.get("response"), text_of(columns.get("answer")), verifier or columns.get("verifier")
    if not isinstance(text, str):
        return f"no `response` text; the line has {', '.join(sorted(columns)[:12]) or 'no columns'}"
    if not answer:
        return "no `answer`, or an empty one"
    if not isinstance(name, str):
        return "no `verifier` column, and none was named for the file"
    num_tokens = columns.get("num_tokens", 0)
    if not isinstance(num_tokens, int) or not 0 <= num_tokens <= _MAX_TOKENS:
        return f"`num_tokens` is {num_tokens!r:.80}; expected a count"
    reason: Any = columns.get("finish_reason", "stop")
    if not isinstance(reason, str) or reason not in _FINAL:
        return f"`finish_reason` is {reason!r:.80}; expected {' or '.join(_FINAL)}"
    return Response(
        prompt_text=str(columns.get("prompt", "")),
        response_text=text,
        answer=answer,
        verifier=name,
        extra={key: value for key, value in columns.items() if key not in _OWN_COLUMNS},
        num_tokens=num_tokens,
        finish_reason=_FINAL[reason],
    )
