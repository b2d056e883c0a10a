"""Scores a file of responses with the reward worker's sandbox and shaping.

*Consumes* a JSONL or Parquet file. *Produces* a ScoreReport, and on request a JSON line for each
response. *Waits for* verifiers, each within its time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pipeline.algorithms.terms.guidance import RIGHT_ACCURACY
from pipeline.cli.score.distribution import ScoreReport, ScoreTally
from pipeline.config.rewards import endpoint_verifiers
from pipeline.config.training import RewardSection
from pipeline.data.end_tokens import model_ends, response_texts
from pipeline.data.files import BadRow, Row, read_rows
from pipeline.data.lines import text_of
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.rewards.functions import guidance_for, score_responses
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.registry import needs_answer, resolve
from pipeline.rewards.shaping import shape
from pipeline.rewards.signature import MAX_BATCH
from pipeline.rewards.verifier import Response, VerifierFailure, VerifierOutcome
from pipeline.runtime.machine import this_machine
from protocol.errors import ConfigError, DataError
from protocol.trajectory import FinishReason, Guidance, RewardScore


class PassRates:
    """Counts the right responses of each prompt. Memory grows with the number of prompts."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], tuple[int, int]] = {}

    def add(self, response: Response, accuracy: float) -> None:
        """Count a judged response, unless it lacks its prompt."""
        if response.prompt_text.strip():
            key = (response.prompt_text, response.answer, response.verifier)
            right, judged = self._counts.get(key, (0, 0))
            self._counts[key] = (right + (accuracy == 1.0), judged + 1)

    def write(self, path: Path) -> None:
        """Write a JSON line for each prompt, in the order of first responses. Raises DataError if
        no response had a prompt."""
        if not self._counts:
            raise DataError("no judged line has a `prompt`, so there are no pass rates; add that column")
        with path.open("wb") as file:
            for (prompt, answer, verifier), (right, judged) in self._counts.items():
                rate = right / judged
                line = {"prompt": prompt, "answer": answer, "verifier": verifier, "pass_rate": rate}
                file.write(msgspec.json.encode(line | {"difficulty": 1.0 - rate, "num_judged": judged}) + b"\n")


_OWN_COLUMNS = frozenset({"response", "answer", "prompt", "verifier", "num_tokens", "finish_reason"})
_MAX_TOKENS = 1 << 31
_BATCH_A_PROCESS = 64
"""Responses that wait for each process, so that a slow one does not leave others idle for long."""
_FINAL = {str(reason): reason for reason in FinishReason if reason.is_final}


def scoring_settings(
    folders: Iterable[Path], *, timeout_s: float | None, processes: int | None, config: RewardSection | None = None
) -> RewardSection:
    """Return ``config`` adapted to offline scoring: ``folders`` come before ``reward.path``, and
    there is one process per core unless ``processes`` is given."""
    config = config or RewardSection()
    given = {"path": (*(folder.absolute() for folder in folders), *config.path)}
    given |= {"timeout_s": timeout_s or config.timeout_s, "processes": processes or this_machine().num_cores}
    return config.model_copy(update=given)


def score_file(
    path: Path,
    verifier: str | None = None,
    *,
    config: RewardSection | None = None,
    default_verifier: str | None = None,
    max_response_tokens: int | None = None,
    by: str | None = None,
    out: Path | None = None,
    pass_rates: Path | None = None,
    on_judged: Callable[[int], None] | None = None,
    judgments: str = "",
    model: Path | None = None,
) -> ScoreReport:
    """Score every response of a ``.jsonl`` or ``.parquet`` file and return the distribution.

    Args:
        path: the file of responses.
        verifier: judges every line. Without it each line names a registered one.
        config: its functions add their parts to the reward.
        default_verifier: judges the lines that name none.
        max_response_tokens: needed only by the soft over-long penalty.
        by: a column to break the distribution down by.
        out: JSONL file to write, with the verdict, failure or reading error of each line.
        pass_rates: file to write and train on, with each prompt's difficulty.
        on_judged: receives the number of lines judged since its last call.
        judgments: source of judgments, as ``guidance.judgments``.
        model: folder of the model. With it verifiers see tokens, and texts with and without
            special tokens, as in a run.

    Raises:
        DataError: the file is missing, unreadable or without a response.
        ConfigError: a verifier does not exist or cannot be imported, or the soft penalty lacks its
            limit.
    """
    config = config or RewardSection()
    if "soft" in config.overlong and max_response_tokens is None:
        raise ConfigError(
            "reward.overlong is soft, which needs max_response_tokens, the length with the largest penalty"
        )
    for name in filter(None, (verifier, default_verifier)):
        resolve(name)
    tally = ScoreTally(str(path), verifier, by)
    rows = read_rows(path)
    for written in filter(None, (out, pass_rates)):
        if written.exists() and written.samefile(path):
            raise ConfigError(f"{written}: the verdicts would replace the responses; name another file")
    rates = PassRates()
    with nullcontext() if out is None else out.open("wb") as file:
        job = _Job(
            verifier,
            default_verifier,
            config,
            max_response_tokens or 0,
            tally,
            rates,
            file,
            on_judged or (lambda _: None),
            judgments,
            None if model is None else _Written(model),
        )
        asyncio.run(job.score(rows))
    if pass_rates is not None:
        rates.write(pass_rates)
    report = tally.report()
    if report.num_responses == 0:
        raise DataError(f"{path}: no response to score; {'; '.join(report.bad_lines[:3]) or 'the file is empty'}")
    return report


class _Written:
    """Turns responses into what a model would have sampled."""

    def __init__(self, model: Path) -> None:
        """Read the tokenizer in a folder. Raises DataError if it has none."""
        self._tokenizer = load_text_tokenizer(model)
        self._ends = model_ends(model, self._tokenizer)

    def read(self, response: Response) -> Response:
        """Return a response with its tokens, and with the texts that follow from them."""
        tokens = self._tokenizer.encode(response.response_text, add_special_tokens=False)
        # a template writes a line end after the turn, which no model samples
        trimmed = self._tokenizer.encode(response.response_text.rstrip(), add_special_tokens=False)
        if trimmed and trimmed[-1] in self._ends:
            tokens = trimmed
        text, raw = response_texts(tokens, self._tokenizer, self._ends)
        return msgspec.structs.replace(response, response_text=text, raw_text=raw, token_ids=tokens)


@dataclass(frozen=True, slots=True)
class _Job:
    verifier: str | None
    default_verifier: str | None
    config: RewardSection
    max_response_tokens: int
    tally: ScoreTally
    rates: PassRates
    out: BinaryIO | None
    on_judged: Callable[[int], None]
    judgments: str
    written: _Written | None

    async def score(self, rows: Iterator[Row | BadRow]) -> None:
        config, verifier = self.config, self.verifier
        named = [name for name in (verifier, self.default_verifier) if name is not None]
        named += [function.verifier for function in config.functions.values()]
        configured = (*config.verifiers, *named, *endpoint_verifiers(config.endpoints))
        size = max(config.max_batch, _BATCH_A_PROCESS * config.processes)
        async with VerifierPool(config, configured=configured) as pool:
            await pool.start(named)
            if self.judgments:
                await pool.start_judgments(self.judgments)
            for batch in self._batches(rows, size):
                read = [row.detail if isinstance(row, BadRow) else self._response(row) for row in batch]
                responses = [found for found in read if not isinstance(found, str)]
                self.on_judged(len(read) - len(responses))
                groups = [
                    _group(response.extra, response.prompt_text) or index for index, response in enumerate(responses)
                ]
                outcomes = await score_responses(
                    pool, config.functions, responses, groups=groups, on_judged=self.on_judged
                )
                scores = [self._score(*one) for one in zip(responses, outcomes, strict=True)]
                guidance = await self._guidance(pool, responses, scores)
                results = zip(outcomes, scores, guidance, strict=True)
                for row, found in zip(batch, read, strict=True):
                    if isinstance(found, str):
                        self.tally.add_bad_line(row.line, found)
                        self._write({"line": row.line, "unreadable": found})
                    else:
                        self._judged(row.line, found, *next(results))

    def _batches(self, rows: Iterator[Row | BadRow], size: int) -> Iterator[list[Row | BadRow]]:
        """Yield batches. If functions judge whole groups, no batch ends inside a group."""
        judges_groups = any(function.whole_group for function in self.config.functions.values())
        batch: list[Row | BadRow] = []
        last = ""
        for row in rows:
            columns = row.columns if isinstance(row, Row) else {}
            group = _group(columns, columns.get("prompt"))
            is_inside = judges_groups and group and group == last and len(batch) < size + MAX_BATCH
            if len(batch) >= size and not is_inside:
                yield batch
                batch = []
            batch.append(row)
            last = group
        if batch:
            yield batch

    def _response(self, row: Row) -> Response | str:
        found = _response(row, self.verifier or row.columns.get("verifier") or self.default_verifier)
        return found if isinstance(found, str) or self.written is None else self.written.read(found)

    def _score(self, response: Response, outcome: VerifierOutcome) -> RewardScore | None:
        if isinstance(outcome, VerifierFailure):
            return None
        return shape(
            self.config,
            outcome,
            num_tokens=response.num_tokens,
            max_response_tokens=self.max_response_tokens,
            finish_reason=response.finish_reason,
        )

    async def _guidance(
        self, pool: VerifierPool, responses: Sequence[Response], scores: Sequence[RewardScore | None]
    ) -> list[Guidance | None]:
        if not self.judgments:
            return [None] * len(responses)
        scored = {index: score for index, score in enumerate(scores) if score is not None}
        made = await guidance_for(
            pool,
            self.judgments,
            [responses[index] for index in scored],
            list(scored.values()),
            right_above=RIGHT_ACCURACY,
        )
        found = dict(zip(scored, made, strict=True))
        return [found.get(index) for index in range(len(responses))]

    def _judged(
        self,
        line: int,
        response: Response,
        outcome: VerifierOutcome,
        score: RewardScore | None,
        guidance: Guidance | None,
    ) -> None:
        if isinstance(outcome, VerifierFailure) or score is None:
            assert isinstance(outcome, VerifierFailure)
            self.tally.add_failure(line, response, outcome)
            verdict: dict[str, Any] = {"failure": outcome.kind, "error": outcome.error}
        else:
            self.tally.add_score(response, score, judged=outcome.judged)
            if outcome.judged:
                self.rates.add(response, score.accuracy)
            found = {name: getattr(score, name) for name in ("accuracy", "reward", "parts", "masked")}
            verdict = {**found, "judged": outcome.judged, "reason": outcome.reason}
        if guidance is not None:
            self.tally.add_judgment(line, guidance)
            texts = {"judgment": guidance.judge_text, "judgment_absent": guidance.absent}
            verdict |= {name: text for name, text in texts.items() if text}
        self._write({"line": line, "verifier": response.verifier, **verdict})

    def _write(self, verdict: dict[str, Any]) -> None:
        if self.out is not None:
            self.out.write(msgspec.json.encode(verdict) + b"\n")


def _group(columns: Mapping[str, Any], prompt: object) -> str:
    """Return a line's group: its column `group`, else its prompt; "" for a line without both."""
    return str(columns.get("group") or prompt or "")


def _response(row: Row, name: Any) -> Response | str:
    """Return a line's response, or the text of its error."""
    columns = {name: value for name, value in row.columns.items() if value is not None}
    text, answer = columns.get("response"), text_of(columns.get("answer"))
    if not isinstance(text, str):
        return f"no `response` text; the line has {', '.join(sorted(columns)[:12]) or 'no columns'}"
    if not answer and needs_answer(str(name)):
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
        answer=answer or "",
        verifier=name,
        extra={key: value for key, value in columns.items() if key not in _OWN_COLUMNS},
        num_tokens=num_tokens,
        finish_reason=_FINAL[reason],
    )
