"""``headrace requeue`` and ``dead-letters``: putting work back by hand.

*Consumes* names of workers, trajectories, fields and dead letters. *Produces* open leases, chunks
that are due, prompts that are admitted again. *Waits for* the ledger's answer. What each keeps and
cannot do: ``pipeline.ledger.admin``.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import attach, echo_json, json_option, look_at, run_among, run_argument
from protocol.errors import ConfigError
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from pipeline.cli.common import Attached
    from pipeline.ledger.admin import Requeued, Retried, Wish
    from pipeline.ledger.contract import DeadLetter
    from pipeline.ledger.redis.admin import RedisAdmin
    from protocol.ids import TrajectoryId

_MOST_LETTERS = 1000


@click.command(
    epilog="""\b
Examples:
  headrace requeue --worker generator-2     # open all that it holds, for others, before its lease ends
  headrace requeue t.81.4 t.82.0            # open these, and hand out again what they lack
  headrace requeue --field reward           # hand out again, now, every chunk that lacks a reward

Nothing is lost or counted twice: trajectories go on from their last chunk, a worker that still had one is told so by its next
write, and a field is written once. What the learner has claimed is its own, and comes back by itself when it dies."""
)
@click.argument("trajectories", nargs=-1, metavar="[TRAJECTORY]... [RUN]")
@click.option("--worker", help="Open all that this worker holds.")
@click.option("--field", help="Hand out again what lacks this: reward, reference or value.")
@run_among("trajectories")
@json_option
def requeue(
    trajectories: tuple[str, ...], worker: str | None, field: str | None, run: Path | None, as_json: bool
) -> None:
    """Put work back: open leased trajectories for others, make unscored chunks due."""
    wish = _wish(trajectories, worker, field)

    async def put_back() -> Requeued:
        async with attach(run) as at:
            answer = await _admin(at).requeue(wish)
        if answer.unknown and worker:
            raise ConfigError(
                f"no worker {worker!r} ever registered with this run; `headrace status` names those that are there"
            )
        if answer.unknown:
            raise ConfigError(
                f"{', '.join(answer.unknown)}: not in the ledger; what is trained on or dropped is forgotten. Nothing was "
                "changed; an id is LANE.GROUP.MEMBER, as t.81.4, and `headrace why` names those that are waited for"
            )
        return answer

    answer = asyncio.run(put_back())
    if as_json:
        echo_json(answer)
        return
    if worker and not answer.num_opened:
        click.echo(f"{worker} holds no trajectories; for chunks that a scorer keeps, `headrace requeue --field FIELD`")
        return
    told = [f"{answer.num_opened} trajectories are open for others"] if field is None else []
    told += [f"{answer.num_due} chunks are due now"] if worker is None else []
    click.echo(", ".join(told))


def _wish(trajectories: tuple[str, ...], worker: str | None, field: str | None) -> Wish:
    from pipeline.ledger.admin import Wish
    from protocol.trajectory import Field

    if sum((bool(trajectories), worker is not None, field is not None)) != 1:
        raise ConfigError("say what to put back: trajectories, or --worker NAME, or --field NAME, one of the three")
    if field is not None and field not in set(Field):
        raise ConfigError(f"--field {field}: expected {', '.join(Field)}")
    parsed = tuple(dict.fromkeys(_trajectory(text) for text in trajectories))
    return Wish(worker or "", parsed, Field(field) if field is not None else None)


def _trajectory(text: str) -> TrajectoryId:
    from protocol.ids import TrajectoryId

    try:
        return TrajectoryId.parse(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a trajectory; expected LANE.GROUP.MEMBER, as t.81.4") from error


def _admin(at: Attached) -> RedisAdmin:
    from pipeline.ledger.redis.admin import RedisAdmin
    from pipeline.ledger.redis.ledger import RedisLedger

    assert isinstance(at.ledger, RedisLedger)
    return RedisAdmin(at.ledger)


# -- dead letters ----------------------------------------------------------------------------------


@click.group(name="dead-letters", context_settings={"help_option_names": ["-h", "--help"]})
def dead_letters() -> None:
    """List, show and retry work that a scorer failed on as often as it may.

    Its unit was dropped (`dead_letter` in `headrace audit`) and its tokens are gone; the letter
    keeps the last traceback. Retrying admits the prompt again, as a new group that is sampled by
    the present policy.
    """


@dead_letters.command(
    name="list", epilog="\b\nExamples:\n  headrace dead-letters list\n  headrace dead-letters list runs/demo --json"
)
@run_argument
@click.option("--limit", type=click.IntRange(1, _MOST_LETTERS), default=100, show_default=True)
@json_option
def list_(run: Path | None, limit: int, as_json: bool) -> None:
    """List dead letters, newest first."""
    letters = asyncio.run(_read(run, limit))
    if as_json:
        echo_json(letters)
        return
    if not letters:
        click.echo("no dead letters")
        return
    click.echo("\n".join(_rows(letters, shutil.get_terminal_size((80, 24)).columns)))


def _rows(letters: Sequence[DeadLetter], width: int) -> list[str]:
    """Return two lines a letter, its names whole, its error cut to ``width`` characters."""
    rows = [
        (one.chunk, one.role, str(one.prompt), str(one.num_attempts), _age(one), printable_line(one.worker))
        for one in letters
    ]
    named = [("chunk", "field", "prompt", "tries", "age", "worker"), *rows]
    widths = [max(len(row[place]) for row in named) for place in range(len(named[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in named]
    shown = [click.style(lines[0], dim=True)]
    for letter, line in zip(letters, lines[1:], strict=True):
        error = printable_line(_last_line(letter.error))
        room = max(40, width) - 2
        shown += [line, "  " + (error if len(error) <= room else f"{error[: room - 3]}...")]
    hints = (
        "`headrace dead-letters show CHUNK` has the traceback",
        "`headrace dead-letters retry CHUNK` admits the prompt again",
    )
    return [*shown, "", *hints]


@dead_letters.command(epilog="\b\nExample:\n  headrace dead-letters show t.81.4.1")
@click.argument("chunk", nargs=-1, metavar="CHUNK [RUN]")
@run_among("chunk")
@json_option
def show(chunk: tuple[str, ...], run: Path | None, as_json: bool) -> None:
    """Show one dead letter whole, with its traceback."""
    if len(chunk) != 1:
        raise click.UsageError(
            "say which one: headrace dead-letters show t.81.4.1; `headrace dead-letters list` names them"
        )
    letters = [letter for letter in asyncio.run(_read(run, _MOST_LETTERS)) if letter.chunk == chunk[0]]
    if not letters:
        raise ConfigError(f"{chunk[0]} names no dead letter; `headrace dead-letters list` names those that there are")
    if as_json:
        echo_json(letters[0])
        return
    letter = letters[0]
    click.echo(
        printable(
            f"{letter.chunk}: {letter.role} failed {letter.num_attempts} times, last {_age(letter)} ago on {letter.worker}; "
            f"prompt {letter.prompt} of the stream\n\n{letter.error.rstrip()}"
        )
    )


@dead_letters.command(
    epilog="""\b
Examples:
  headrace dead-letters retry t.81.4.1
  headrace dead-letters retry --all

The dropped group stays dropped in the books. Its prompt is admitted again as a new group, before fresh prompts, once there is
credit. Mend the verifier first: a reward worker reads it when it starts (end the worker; the supervisor starts it again).
Letters of one group are one prompt. Evaluation responses cannot be retried: the next evaluation samples its prompts anyway."""
)
@click.argument("chunks", nargs=-1, metavar="[CHUNK]... [RUN]")
@click.option("--all", "every", is_flag=True, help="All but those of evaluations.")
@run_among("chunks")
@json_option
def retry(chunks: tuple[str, ...], every: bool, run: Path | None, as_json: bool) -> None:
    """Admit the prompts of dead letters again, and take the letters off the list."""
    if every == bool(chunks):
        raise ConfigError("say what to retry: chunks that `headrace dead-letters list` names, or --all")

    async def again() -> Retried:
        async with attach(run) as at:
            answer = await _admin(at).retry(None if every else chunks)
            if answer.is_closed:
                raise ConfigError(
                    f"{at.run_dir} admits nothing any more: it has all the updates that it wants. Nothing was changed"
                )
        if answer.unknown:
            raise ConfigError(
                f"{', '.join(answer.unknown)}: no dead letter of a training response. Nothing was changed; `headrace "
                "dead-letters list` names those that there are, and those of evaluations (e...) cannot be retried"
            )
        return answer

    answer = asyncio.run(again())
    if as_json:
        echo_json(answer)
        return
    click.echo(
        f"{answer.num_letters} dead letters: {len(answer.prompts)} prompts are admitted again, before fresh ones"
        if answer.num_letters
        else "no dead letters of training responses"
    )


async def _read(run: Path | None, limit: int) -> list[DeadLetter]:
    async with look_at(run) as at:
        return await at.ledger.dead_letters(limit=limit)


def _age(letter: DeadLetter) -> str:
    from pipeline.observability.why.types import seconds

    return seconds(time.time() - letter.at_s)


def _last_line(error: str) -> str:
    lines = [line for line in error.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
