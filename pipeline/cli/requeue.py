"""``headrace ledger requeue`` and ``headrace ledger dead-letters``: put work back by hand.

``pipeline.ledger.admin`` says what each guarantees, and its limits."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import aligned, answer, json_option, run_among, run_argument
from pipeline.operator.attached import attach, look_at
from protocol.errors import ConfigError
from protocol.printable import printable, printable_line

if TYPE_CHECKING:
    from pipeline.ledger.admin import Requeued, RequeueRequest, Retried
    from pipeline.ledger.types import DeadLetter
    from protocol.ids import TrajectoryId

_MOST_LETTERS = 1000


@click.command(
    epilog="""\b
Examples:
  headrace ledger requeue --worker generator-2  # free all that it holds
  headrace ledger requeue t.81.4 t.82.0         # free these, score again
  headrace ledger requeue --field reward        # every unrewarded chunk

Nothing is lost or counted twice. A released trajectory continues from its last chunk, and its
former worker is fenced at its next write. A field is written once. Units that the learner has
claimed are not affected; they return automatically if it dies."""
)
@click.argument("trajectories", nargs=-1, metavar="[TRAJECTORY]... [RUN]")
@click.option("--worker", help="Release all trajectories that this worker holds.")
@click.option("--field", help="Send chunks without this field to scorers again: reward, reference or value.")
@run_among("trajectories")
@json_option
def requeue(
    trajectories: tuple[str, ...], worker: str | None, field: str | None, run: Path | None, as_json: bool
) -> None:
    """Release leased trajectories to other generators, and send unscored chunks to scorers again."""
    request = _request(trajectories, worker, field)

    async def put_back() -> Requeued:
        async with attach(run) as at:
            found = await at.admin.requeue(request)
        if found.unknown and worker:
            raise ConfigError(f"no worker {worker!r} has registered with this run; `headrace status` lists workers")
        if found.unknown:
            raise ConfigError(
                f"{', '.join(found.unknown)}: not in the ledger, which forgets trained and dropped trajectories. "
                f"Nothing was changed. Expected LANE.GROUP.MEMBER, for example t.81.4; `headrace why` names those "
                f"that the run waits for"
            )
        return found

    found = asyncio.run(put_back())
    done = [f"{found.num_opened} trajectories are open for others"] if field is None else []
    done += [f"{found.num_due} chunks are due now"] if worker is None else []
    if worker and not found.num_opened:
        done = [
            f"{worker} holds no trajectories; for chunks that a scorer holds: `headrace ledger requeue --field FIELD`"
        ]
    answer(as_json, found, ", ".join(done))


def _request(trajectories: tuple[str, ...], worker: str | None, field: str | None) -> RequeueRequest:
    from pipeline.ledger.admin import RequeueRequest
    from protocol.trajectory import Field

    if sum((bool(trajectories), worker is not None, field is not None)) != 1:
        raise ConfigError("expected exactly one of: trajectories, --worker NAME, or --field NAME")
    if field is not None and field not in set(Field):
        raise ConfigError(f"--field {field}: expected {', '.join(Field)}")
    parsed = tuple(dict.fromkeys(_trajectory(text) for text in trajectories))
    return RequeueRequest(worker or "", parsed, Field(field) if field is not None else None)


def _trajectory(text: str) -> TrajectoryId:
    from protocol.ids import TrajectoryId

    try:
        return TrajectoryId.parse(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a trajectory; expected LANE.GROUP.MEMBER, for example t.81.4") from error


# -- dead letters ----------------------------------------------------------------------------------


@click.group(name="dead-letters", context_settings={"help_option_names": ["-h", "--help"]})
def dead_letters() -> None:
    """List, show and retry work that a scorer or the learner gave up on.

    A scorer gives up after its last attempt. The unit is dropped with its tokens (`dead_letter` in
    `headrace ledger audit`); the letter keeps the last traceback. A group continues without a
    response that got no verdict. The learner gives up on units whose step was not finite twice
    (`non_finite`). A retry admits the prompt again, as a new group sampled by the current policy."""


@dead_letters.command(
    name="list",
    epilog="\b\nExamples:\n  headrace ledger dead-letters list\n  headrace ledger dead-letters list runs/demo --json",
)
@run_argument
@click.option(
    "--limit", type=click.IntRange(1, _MOST_LETTERS), default=100, show_default=True, help="List at most this many."
)
@json_option
def list_(run: Path | None, limit: int, as_json: bool) -> None:
    """List dead letters, newest first."""
    letters = asyncio.run(_read(run, limit))
    width = shutil.get_terminal_size((80, 24)).columns
    answer(as_json, letters, *(_rows(letters, width) if letters else ["no dead letters"]))


def _rows(letters: Sequence[DeadLetter], width: int) -> list[str]:
    """Return two lines per letter: its names, and its error cut to ``width`` characters."""
    numbers = [(str(one.prompt), str(one.num_attempts), _age(one)) for one in letters]
    rows = [(one.chunk, one.role, *n, printable_line(one.worker)) for one, n in zip(letters, numbers, strict=True)]
    head, *lines = aligned([("chunk", "field", "prompt", "tries", "age", "worker"), *rows])
    shown = [click.style(head, dim=True)]
    for letter, line in zip(letters, lines, strict=True):
        error = printable_line(_last_line(letter.error))
        room = max(40, width) - 2
        shown += [line, "  " + (error if len(error) <= room else f"{error[: room - 3]}...")]
    hint = "`headrace ledger dead-letters retry CHUNK` admits the prompt again"
    return [*shown, "", "`headrace ledger dead-letters show CHUNK` has the traceback", hint]


@dead_letters.command(epilog="\b\nExample:\n  headrace ledger dead-letters show t.81.4.1")
@click.argument("chunk", nargs=-1, metavar="CHUNK [RUN]")
@run_among("chunk")
@json_option
def show(chunk: tuple[str, ...], run: Path | None, as_json: bool) -> None:
    """Show one dead letter with its traceback."""
    if len(chunk) != 1:
        raise click.UsageError(
            "expected one chunk, for example t.81.4.1; `headrace ledger dead-letters list` names them"
        )
    letters = [letter for letter in asyncio.run(_read(run, _MOST_LETTERS)) if letter.chunk == chunk[0]]
    if not letters:
        raise ConfigError(f"{chunk[0]} is not a dead letter; `headrace ledger dead-letters list` names them")
    letter = letters[0]
    head = (
        f"{letter.chunk}: {letter.role} failed {letter.num_attempts} times, last {_age(letter)} ago on {letter.worker}"
    )
    answer(as_json, letter, printable(f"{head}; prompt {letter.prompt} of the stream\n\n{letter.error.rstrip()}"))


@dead_letters.command(
    epilog="""\b
Examples:
  headrace ledger dead-letters retry t.81.4.1
  headrace ledger dead-letters retry --all

Fix the verifier first: reward workers load it when they start, so end them, and the supervisor
restarts them. The dropped group stays counted as dropped. Its prompt is admitted as a new group,
before new prompts, once there is credit; letters of one group are one prompt. Letters of
evaluations cannot be retried, since the next evaluation samples their prompts anyway."""
)
@click.argument("chunks", nargs=-1, metavar="[CHUNK]... [RUN]")
@click.option("--all", "every", is_flag=True, help="All letters except those of evaluations.")
@run_among("chunks")
@json_option
def retry(chunks: tuple[str, ...], every: bool, run: Path | None, as_json: bool) -> None:
    """Admit the prompts of dead letters again."""
    if every == bool(chunks):
        raise ConfigError("expected chunks that `headrace ledger dead-letters list` names, or --all")

    async def again() -> Retried:
        async with attach(run) as at:
            found = await at.admin.retry(None if every else chunks)
            if found.is_closed:
                raise ConfigError(
                    f"{at.run_dir} has made all its updates, so it admits no more prompts. Nothing was changed"
                )
        if found.unknown:
            raise ConfigError(
                f"{', '.join(found.unknown)}: no dead letter of a training response. Nothing was changed. "
                "`headrace ledger dead-letters list` names them; those of evaluations (e...) cannot be retried"
            )
        return found

    found = asyncio.run(again())
    done = f"{found.num_letters} dead letters: {len(found.prompts)} prompts are admitted again, before fresh ones"
    answer(as_json, found, done if found.num_letters else "no dead letters of training responses")


async def _read(run: Path | None, limit: int) -> list[DeadLetter]:
    async with look_at(run) as at:
        return await at.ledger.dead_letters(limit=limit)


def _age(letter: DeadLetter) -> str:
    from pipeline.fleet.why.types import seconds

    return seconds(time.time() - letter.at_s)


def _last_line(error: str) -> str:
    lines = [line for line in error.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
