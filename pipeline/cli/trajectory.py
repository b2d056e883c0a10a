"""``headrace ledger trajectory``: what happened to one trajectory, with its text where it was kept."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import run_among, titled
from pipeline.cli.looking_again import Picture, looking
from protocol.errors import ConfigError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.ledger.life import TrajectoryLife
    from pipeline.observability.samples import ResponseSample
    from pipeline.operator.attached import Attached
    from protocol.ids import TrajectoryId


@click.command(
    epilog="""\b
Examples:
  headrace ledger trajectory t.12.3           # member 3 of group 12
  headrace ledger trajectory t.12.3 runs/demo --json
  headrace ledger trajectory t.12.3 --watch   # while it is sampled and scored
  headrace ledger trajectory e4.7.0           # an evaluation response

The ledger remembers the newest 10,000 trajectories that have left it. Their text is shown if the
learner kept it as a sample (`headrace samples`)."""
)
@click.argument("name", nargs=-1, required=True, metavar="NAME [RUN]")
@run_among("name")
@looking
async def trajectory(at: Attached, name: tuple[str, ...]) -> Picture:
    """Show the whole life of a trajectory: leases, chunks, scores, end."""
    return await picture_of(at, _parsed(name))


async def picture_of(at: Attached, asked: TrajectoryId) -> Picture:
    """Return a trajectory's life as JSON and lines. Raises ConfigError: it is not known."""
    from pipeline.ledger.life import UnknownTrajectory

    life = await at.inspection.life(asked)
    sample = _sample(at, str(asked))
    if isinstance(life, UnknownTrajectory):
        if asked.is_evaluation and (scored := await _evaluated(at, asked)):
            return Picture(scored, lambda: (_scored_line(str(asked), scored),))
        if sample is None:
            raise ConfigError(f"{life.words}; `headrace ledger groups` and `headrace ledger peek` list others")
        note = f"{life.words}; its sample is there"
        return Picture({"life": None, "sample": sample}, lambda: (note, *_text(sample)))
    return Picture({"life": life, "sample": sample}, lambda: render(life, sample))


def _parsed(words: tuple[str, ...]) -> TrajectoryId:
    from protocol.ids import TrajectoryId

    if len(words) != 1:
        raise click.UsageError(f"expected one trajectory, got {len(words)}: {' '.join(words) or 'none'}")
    try:
        return TrajectoryId.parse(words[0])
    except ValueError as error:
        raise ConfigError(f"{error}; `headrace ledger groups` and `headrace ledger peek` list names") from error


def _sample(at: Attached, name: str) -> ResponseSample | None:
    from pipeline.observability.samples import SAMPLES_NAME, read_samples

    found = [one for one in read_samples(at.run_dir / SAMPLES_NAME) if one.trajectory == name]
    return found[-1] if found else None


async def _evaluated(at: Attached, name: TrajectoryId) -> dict[str, Any] | None:
    """Return the score of an evaluation response that has left the ledger."""
    state = await at.ledger.evaluation(int(name.lane[1:]))
    for one in state.samples if state is not None else ():
        if (one.prompt, one.sample) == (name.group, name.member):
            return {"trajectory": str(name), "evaluation": one}
    return None


def _scored_line(name: str, scored: dict[str, Any]) -> str:
    from pipeline.ledger.life import versions_words

    one = scored["evaluation"]
    return (
        f"{name}: an evaluation response, scored: accuracy {one.accuracy:g}, reward {one.reward:+.2f}, {one.num_tokens:,} "
        f"tokens, sampled by version {versions_words((one.oldest_version, one.newest_version))}"
    )


def render(life: TrajectoryLife, sample: ResponseSample | None) -> Iterator[str]:
    """Yield a life as lines, safe for a terminal: one an event, in the order of time."""
    from pipeline.ledger.life import life_events

    prompt = "" if life.prompt is None else f", prompt {life.prompt}"
    state = click.style(life.state, bold=True)
    yield f"{life.name}: {state}, {life.num_tokens:,} tokens in {_many(life.num_chunks, 'chunk')}{prompt}"
    events = life_events(life)
    began = events[0][0] if events else 0.0
    if events:
        yield f"  {_local(began):%d %b %Y}, by the ledger server's clock:"
    for at_s, words in events:
        yield f"  {_local(at_s):%H:%M:%S} {at_s - began:+8.2f} s  {printable_line(words)}"
    if hidden := life.num_chunks - len(life.chunks):
        yield f"  {_many(hidden, 'chunk')} in the middle are not kept, or have left the ledger"
    if hidden := life.num_leases - len(life.leases):
        yield f"  {_many(hidden, 'earlier lease')} not kept"
    if sample is not None:
        yield from _text(sample)


def _text(sample: ResponseSample) -> list[str]:
    return titled({"prompt": sample.prompt, "response": sample.response, "answer": sample.answer})


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _local(at_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at_s, tz=datetime.UTC).astimezone()
