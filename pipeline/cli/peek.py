"""``headrace ledger peek``: list the ledger's chunks, or show one with its scores, as text or messages."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import aligned, echo_json, json_option, run_among, titled
from pipeline.operator.attached import look_at
from protocol.errors import ConfigError, DataError, WireError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.ledger.admin import StoredChunk
    from pipeline.operator.attached import Attached
    from protocol.trajectory import Score, TrajectoryChunk

_NOTHING = (
    "the ledger holds no chunk of a training response: all were trained on or dropped, or none was sampled yet; "
    "`headrace samples` shows responses of updates, `headrace why` explains what the run waits for"
)


@click.command(
    epilog="""\b
Examples:
  headrace ledger peek                 # chunks of the newest trajectories
  headrace ledger peek --latest        # the newest chunk of all, as text
  headrace ledger peek t.12.3.0        # first chunk of member 3 of group 12
  headrace ledger peek t.12.3.0 --raw  # its messages, as MessagePack

Trained and dropped work has left the ledger; `headrace samples` shows responses of updates."""
)
@click.argument("chunk", nargs=-1, metavar="[CHUNK] [RUN]")
@click.option("--latest", is_flag=True, help="Show the chunk that was written last.")
@click.option("--raw", is_flag=True, help="Show the stored messages, read with the plain msgpack package.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="List at most this many trajectories."
)
@run_among("chunk")
@json_option
def peek(chunk: tuple[str, ...], latest: bool, raw: bool, limit: int, run: Path | None, as_json: bool) -> None:
    """List what the ledger holds, or show one chunk with its scores."""
    if len(chunk) + latest > 1:
        raise click.UsageError("expected one chunk: give one name, or --latest")
    asyncio.run(_look(chunk[0] if chunk else None, run, latest=latest, raw=raw, limit=limit, as_json=as_json))


async def _look(name: str | None, run: Path | None, *, latest: bool, raw: bool, limit: int, as_json: bool) -> None:
    from protocol.peek import peek as read_plainly

    async with look_at(run) as at:
        if name is None:
            stored = sorted(await at.admin.stored(max_trajectories=limit), key=lambda one: one.age_s)
            if not latest:
                echo_json(stored) if as_json else click.echo("\n".join(rows(stored)))
                return
            if not stored:
                raise ConfigError(_NOTHING)
            name = stored[0].chunk
        blobs = await at.ledger.peek(name)
        if not blobs:
            raise ConfigError(
                f"{name} is not in the ledger: it was never written, or was trained on or dropped. Expected "
                f"LANE.GROUP.MEMBER.CHUNK, for example t.12.3.0; `headrace ledger peek` lists chunks"
            )
        if not (raw or as_json):
            try:
                click.echo("\n".join(described(at, blobs)))
            # A chunk of another version can still be shown as plain messages.
            except WireError as error:
                click.echo(f"as messages, since this is not a chunk of this version: {printable_line(str(error))}")
            else:
                return
        shown = [read_plainly([blob]) for blob in blobs]
        if as_json:
            echo_json(shown)
            return
        from rich.console import Console

        for item in shown:
            show(item, Console())


def show(message: dict[str, Any], console: Console) -> None:
    """Print a shortened message. Text is printed as its ``repr``, so that none of it acts on a terminal."""
    from rich.pretty import Pretty

    console.print(Pretty(message, max_string=200, max_length=40))


def rows(stored: Sequence[StoredChunk]) -> list[str]:
    from pipeline.fleet.why.types import seconds

    if not stored:
        return [_NOTHING]
    cells = [("chunk", "tokens", "response", "has", "written")]
    for one in stored:
        state = "finished" if one.is_final else "goes on"
        has, written = " ".join(one.fields) or "–", f"{seconds(one.age_s)} ago"
        cells.append((one.chunk, f"{one.num_tokens:,}", state, has, written))
    return aligned(cells)


def described(at: Attached, blobs: Sequence[bytes]) -> list[str]:
    """Return a chunk and its scores as lines. Raises WireError if they are of another version."""
    from protocol.codec import from_blob
    from protocol.trajectory import FinishReason, Score, TrajectoryChunk

    chunk = from_blob(blobs[0], TrajectoryChunk)
    any_score: Any = Score
    scores: list[Score] = [from_blob(blob, any_score) for blob in blobs[1:]]
    # a turn's text is not the whole conversation
    response = None if chunk.finish_reason is FinishReason.TURN else chunk.written_text
    if response is None:
        response = _decoded(at, [*chunk.context_tokens.tolist(), *chunk.tokens.tolist()])
    return as_text(chunk, scores, response)


def _decoded(at: Attached, tokens: list[int]) -> str:
    from pipeline.data.tokenizer import load_text_tokenizer

    try:
        return load_text_tokenizer(at.config.model.path).decode(tokens, skip_special_tokens=False)
    except DataError as error:
        return f"({len(tokens)} tokens; their text is not known: {error})"


def as_text(chunk: TrajectoryChunk, scores: Sequence[Score], response: str) -> list[str]:
    """Return a chunk and its scores as lines; ``response`` is the text up to the chunk's end."""
    versions = " to ".join(dict.fromkeys(str(version) for version in (chunk.versions[0], chunk.versions[-1])))
    head = (
        f"{chunk.id}: {chunk.num_tokens:,} tokens, {chunk.num_sampled:,} of the response so far, "
        f"{chunk.finish_reason}, sampled by version {versions} on {chunk.worker or 'an unknown worker'}"
    )
    texts = {
        "prompt": chunk.prompt.text,
        "response": response + ("" if chunk.response_text is not None else " ..."),
        "answer": chunk.prompt.answer,
        "verifier": chunk.prompt.verifier,
    }
    texts |= _told(scores)
    lines = textwrap.wrap(printable_line(head), 79, subsequent_indent="  ")
    return [*lines, *(f"  {_score(score)}" for score in scores), *titled(texts)]


def _told(scores: Sequence[Score]) -> dict[str, str]:
    from protocol.trajectory import GuidanceScore, RewardScore, Turn

    texts: dict[str, str] = {}
    for score in scores:
        if isinstance(score, RewardScore) and score.guidance is not None:
            given = score.guidance
            texts |= {"gold": given.gold_text, "judgment": given.judge_text, "absent": given.absent}
        elif isinstance(score, GuidanceScore) and score.absent:
            texts["absent"] = score.absent
        elif isinstance(score, Turn):
            texts["turn"] = score.text
    return {title: text for title, text in texts.items() if text}


def _score(score: Score) -> str:
    from protocol.trajectory import GuidanceScore, ReferenceScore, RewardScore, Turn

    if isinstance(score, RewardScore):
        parts = ", ".join(f"{name} {value + 0.0:+.2f}" for name, value in score.parts.items())
        masked = ", masked as over-long" if score.masked else ""
        words = f"reward {score.reward:+.2f}{f' ({parts})' if parts else ''}, accuracy {score.accuracy:g}{masked}"
        return printable_line(words)
    if isinstance(score, ReferenceScore):
        return f"reference log-probs of {score.logprobs.size:,} tokens, mean {score.logprobs.mean():.3f} nats"
    if isinstance(score, GuidanceScore):
        counts = {"standard": score.standard_logprobs.size, "judge": score.judge_logprobs.size}
        there = " and ".join(f"{size:,} {name}" for name, size in counts.items() if size) or "no"
        return printable_line(f"guidance of {there} log-probs, by {score.guide_version}")
    if isinstance(score, Turn):
        ends = "" if not score.is_done else ", truncated" if score.is_truncated else ", the end"
        return f"the environment's answer of {score.tokens.size:,} tokens{ends}, reward so far {score.reward:+.2f}"
    return f"values of {score.values.size:,} tokens, mean {score.values.mean():+.3f}, by value version {score.value_version}"
