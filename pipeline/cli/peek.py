"""``headrace peek``: what is in the ledger, and one stored chunk with its scores, as text or as the
messages that they are.

*Consumes* a chunk's name, or none. *Produces* a list, text that is safe for a terminal, or JSON.
*Waits for* the ledger's answer.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import echo_json, json_option, look_at, run_among
from protocol.errors import ConfigError, DataError, WireError
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.cli.common import Attached
    from pipeline.ledger.admin import StoredChunk
    from protocol.trajectory import Score, TrajectoryChunk

_MARGIN = 11
_NOTHING = (
    "the ledger holds no chunk of a training response: nothing was sampled yet, or all of it was trained on or dropped; "
    "`headrace samples` shows responses of updates, `headrace why` what the run waits for"
)


@click.command(
    epilog="""\b
Examples:
  headrace peek                 # what there is: the newest chunk of the newest trajectories
  headrace peek --latest        # the newest of all, as text
  headrace peek t.12.3.0        # first chunk of member 3 of group 12
  headrace peek t.12.3.0 --raw  # its messages, as any MessagePack reader sees them

What is trained on or dropped is forgotten; `headrace samples` shows responses of updates."""
)
@click.argument("chunk", nargs=-1, metavar="[CHUNK] [RUN]")
@click.option("--latest", is_flag=True, help="The chunk that was written last.")
@click.option("--raw", is_flag=True, help="The stored messages, read with the plain msgpack package.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Trajectories in the list.")
@run_among("chunk")
@json_option
def peek(chunk: tuple[str, ...], latest: bool, raw: bool, limit: int, run: Path | None, as_json: bool) -> None:
    """Show what is in the ledger, or one stored chunk with its scores."""
    if len(chunk) + latest > 1:
        raise click.UsageError("one chunk is asked for: give one name, or --latest")
    asyncio.run(_look(chunk[0] if chunk else None, run, latest=latest, raw=raw, limit=limit, as_json=as_json))


async def _look(name: str | None, run: Path | None, *, latest: bool, raw: bool, limit: int, as_json: bool) -> None:
    from protocol.peek import peek as read_plainly

    async with look_at(run) as at:
        if name is None:
            stored = await _stored(at, limit)
            if not latest:
                echo_json(stored) if as_json else click.echo("\n".join(rows(stored)))
                return
            if not stored:
                raise ConfigError(_NOTHING)
            name = stored[0].chunk
        blobs = await at.ledger.peek(name)
        if not blobs:
            raise ConfigError(
                f"{name} is not in the ledger: it was never written, or it was trained on or dropped and so forgotten; "
                f"an id is LANE.GROUP.MEMBER.CHUNK, as t.12.3.0, and `headrace peek` names those that there are"
            )
        if not (raw or as_json):
            try:
                click.echo("\n".join(_as_text(at, blobs)))
            except WireError as error:  # of another version: legible all the same
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
    """Print what ``protocol.peek`` reads, cut; text stands as its ``repr``, in which nothing acts
    on a terminal.
    """
    from rich.pretty import Pretty

    console.print(Pretty(message, max_string=200, max_length=40))


async def _stored(at: Attached, limit: int) -> list[StoredChunk]:
    """Return what there is, what was written last first."""
    from pipeline.ledger.redis.admin import RedisAdmin
    from pipeline.ledger.redis.ledger import RedisLedger

    assert isinstance(at.ledger, RedisLedger)
    return sorted(await RedisAdmin(at.ledger).stored(max_trajectories=limit), key=lambda one: one.age_s)


def rows(stored: Sequence[StoredChunk]) -> list[str]:
    """Return the list as lines, names whole."""
    from pipeline.observability.why.types import seconds

    if not stored:
        return [_NOTHING]
    cells = [("chunk", "tokens", "response", "has", "written")]
    for one in stored:
        state = "finished" if one.is_final else "goes on"
        cells.append(
            (one.chunk, f"{one.num_tokens:,}", state, " ".join(one.fields) or "–", f"{seconds(one.age_s)} ago")
        )
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _as_text(at: Attached, blobs: Sequence[bytes]) -> list[str]:
    """Return a chunk and its scores as lines. Raises WireError when they are not of
    this version.
    """
    from protocol.codec import from_blob
    from protocol.trajectory import ReferenceScore, RewardScore, TrajectoryChunk, ValueScore

    chunk = from_blob(blobs[0], TrajectoryChunk)
    any_score: Any = RewardScore | ReferenceScore | ValueScore
    scores: list[Score] = [from_blob(blob, any_score) for blob in blobs[1:]]
    response = chunk.response_text
    if response is None:
        response = _decoded(at, [*chunk.context_tokens.tolist(), *chunk.tokens.tolist()])
    return as_text(chunk, scores, response)


def _decoded(at: Attached, tokens: list[int]) -> str:
    from pipeline.data.tokenizer import load_text_tokenizer

    try:
        return load_text_tokenizer(at.config.model.path).decode(tokens)
    except DataError as error:
        return f"({len(tokens)} tokens; their text is not known: {error})"


def as_text(chunk: TrajectoryChunk, scores: Sequence[Score], response: str) -> list[str]:
    """Return a chunk and its scores as lines; ``response`` is the text up to its end."""
    versions = " to ".join(dict.fromkeys(str(version) for version in (chunk.versions[0], chunk.versions[-1])))
    head = (
        f"{chunk.id}: {chunk.num_tokens:,} tokens, {chunk.response_length:,} of the response so far, "
        f"{chunk.finish_reason}, sampled by version {versions} on {chunk.worker or 'an unknown worker'}"
    )
    texts = {
        "prompt": chunk.prompt.text,
        "response": response + ("" if chunk.response_text is not None else " ..."),
        "answer": chunk.prompt.answer,
        "verifier": chunk.prompt.verifier,
    }
    lines = textwrap.wrap(printable_line(head), 79, subsequent_indent="  ")
    lines += [f"  {_score(score)}" for score in scores]
    for name, text in texts.items():
        first, *others = printable(text).split("\n")
        lines += [f"  {name:<{_MARGIN - 2}}{first}", *(" " * _MARGIN + line for line in others)]
    return lines


def _score(score: Score) -> str:
    from protocol.trajectory import ReferenceScore, RewardScore

    if isinstance(score, RewardScore):
        parts = ", ".join(f"{name} {value + 0.0:+.2f}" for name, value in score.parts.items())
        masked = ", masked as over-long" if score.masked else ""
        words = f"reward {score.reward:+.2f}{f' ({parts})' if parts else ''}, accuracy {score.accuracy:g}{masked}"
        return printable_line(words)
    if isinstance(score, ReferenceScore):
        return f"reference log-probs of {score.logprobs.size:,} tokens, mean {score.logprobs.mean():.3f} nats"
    return f"values of {score.values.size:,} tokens, mean {score.values.mean():+.3f}, by value version {score.value_version}"
