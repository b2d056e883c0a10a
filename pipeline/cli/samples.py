"""``headrace samples`` shows prompts with responses, rewards and verdicts, from ``samples.jsonl``;
``headrace ledger trajectory`` shows the life of one trajectory, with its text if it was kept."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import answer, json_option, run_among, run_argument, titled
from pipeline.cli.watch_option import Picture, looking
from pipeline.operator.attached import find_run
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
  headrace samples                       # of the newest update with samples
  headrace samples runs/demo --last 5    # of the newest five
  headrace samples --update 1 --json

For each update the learner keeps samples.per_update responses, and as many from evaluations and
from groups dropped without signal since the previous one. Of older updates it keeps an evenly
spaced selection (samples.keep_updates). The middle of long texts is cut (samples.max_chars)."""
)
@run_argument
@click.option(
    "--last", type=click.IntRange(1), default=1, show_default=True, help="Show this many of the newest updates."
)
@click.option("--update", type=click.IntRange(1), help="Show this update, or the nearest earlier one with samples.")
@json_option
def samples(run: Path | None, last: int, update: int | None, as_json: bool) -> None:
    """Show prompts, responses, rewards and verdicts of updates, also of a running run."""
    run_dir = find_run(run)
    shown = newest_samples(run_dir, last=last, update=update)
    texts = ["\n".join(render_sample(sample)) for sample in shown]
    none = f"no samples in {run_dir}: no update yet, or samples.per_update is 0"
    answer(as_json, shown, "\n\n".join(texts) if shown else none)


def newest_samples(run_dir: Path, *, last: int, update: int | None) -> list[ResponseSample]:
    """Return the samples of the ``last`` newest updates that have any; with ``update``, of that
    update or the nearest earlier one with samples."""
    from pipeline.observability.samples import response_samples

    kept = [s for s in response_samples(run_dir).read()[0] if update is None or s.update <= update]
    updates = sorted({sample.update for sample in kept})[-(last if update is None else 1) :]
    return [sample for sample in kept if sample.update in updates]


def render_sample(sample: ResponseSample) -> list[str]:
    colour = "green" if sample.accuracy == 1.0 else "red"
    head = f"update {sample.update} (made version {sample.policy_version})  {printable_line(sample.trajectory)}  "
    lines = [head + click.style(sample.verdict, fg=colour, bold=True)]
    lines += textwrap.wrap(printable_line(sample.facts), 79, initial_indent="  ", subsequent_indent="  ")
    return lines + titled({"prompt": sample.prompt, "response": sample.response, "answer": sample.answer})


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
    """Return a trajectory's life as JSON and lines. Raises ConfigError if it is not known."""
    from pipeline.ledger.life import UnknownTrajectory

    life = await at.inspection.life(asked)
    sample = _sample(at, str(asked))
    if isinstance(life, UnknownTrajectory):
        if asked.is_evaluation and (scored := await _evaluated(at, asked)):
            return Picture(scored, lambda: (_scored_line(str(asked), scored),))
        if sample is None:
            raise ConfigError(f"{life.words}; `headrace ledger groups` and `headrace ledger peek` list others")
        note = f"{life.words}; only its sample was kept"
        return Picture({"life": None, "sample": sample}, lambda: (note, *_text(sample)))
    return Picture({"life": life, "sample": sample}, lambda: render_life(life, sample))


def _parsed(words: tuple[str, ...]) -> TrajectoryId:
    from protocol.ids import TrajectoryId

    if len(words) != 1:
        raise click.UsageError(f"expected one trajectory, got {len(words)}: {' '.join(words) or 'none'}")
    try:
        return TrajectoryId.parse(words[0])
    except ValueError as error:
        raise ConfigError(f"{error}; `headrace ledger groups` and `headrace ledger peek` list names") from error


def _sample(at: Attached, name: str) -> ResponseSample | None:
    from pipeline.observability.samples import response_samples

    found = [one for one in response_samples(at.run_dir).read()[0] if one.trajectory == name]
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


def render_life(life: TrajectoryLife, sample: ResponseSample | None) -> Iterator[str]:
    """Yield a life as lines safe for a terminal, one per event, in the order of time."""
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
