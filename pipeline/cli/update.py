"""``headrace update``: change a running run's settings or code, roll back, show all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import PATH, aligned, answer, echo_json, json_option, moment, on_run, run_argument, set_option
from pipeline.operator.attached import attach, find_run
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.operator.attached import Attached
    from pipeline.operator.updating import TakenChange
    from pipeline.runtime.registry.settings_change import SettingsChange

_EPILOG = """\b
Examples:
  headrace update --set learner.learning_rate=5e-7 --reason "loss is noisy"
  headrace update runs/demo --set run.num_updates=2000
  headrace update --code my_rewards/   # one worker first, then the others
  headrace update --code ~/headrace/   # a checkout: the workers' own code
  headrace update --rollback
  headrace update --settings    # what can be changed, and which role reads it
  headrace update               # all changes of the run, with their effect

\b
Exit codes:
  0    all affected workers use the change
  1    some do not use it yet after --timeout, and will as soon as they can;
       or the new code was rolled back
  2    the setting cannot be changed, the value is invalid, or the code cannot
       be imported; nothing changed
"""
_NOT_ALL = 1


@click.command(epilog=_EPILOG)
@run_argument
@set_option
@click.option(
    "--code",
    "source",
    type=PATH,
    metavar="DIR|FILE",
    help="New reward functions, as a module or a folder of modules; or another version of Headrace.",
)
@click.option("--lazily", is_flag=True, help="With --code: workers take it only when they restart anyway.")
@click.option("--reason", default="", metavar="TEXT", help="Why; shown with the change.")
@click.option("--rollback", is_flag=True, help="Undo the newest change that is in effect.")
@click.option("--settings", "lists", is_flag=True, help="List the settings that can be changed, and exit.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0.0), default=120.0, show_default=True, help="Seconds to wait."
)
@json_option
def update(
    run: Path | None,
    overrides: tuple[str, ...],
    source: Path | None,
    lazily: bool,
    reason: str,
    rollback: bool,
    lists: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Change settings or code of a running run, without losing work.

    Waits until every affected worker uses the change, which then survives restarts of workers,
    supervisor and run. If the first update with it fails or is not finite, it is rolled back
    automatically.

    --code copies the code into the run's folder and imports it in a separate process. Then one
    worker is replaced and, once it has done some work, the others, one at a time. The code is
    rolled back automatically if a worker fails with it, or if the update rate falls by a third.
    Reward functions affect only reward workers; a folder with Headrace's own packages affects all
    workers.

    Without --set or --code, lists all changes."""
    if lists:
        _list(as_json)
        return 0
    if sum([rollback, bool(overrides), source is not None]) > 1:
        raise click.UsageError("--set, --code and --rollback exclude each other: give one")
    if lazily and source is None:
        raise click.UsageError("--lazily is for new code: give --code, or leave it out")
    if not rollback and not overrides and source is None:
        _show(find_run(run), as_json)
        return 0
    return on_run(attach)(_change)(
        run=run, overrides=overrides, source=source, lazily=lazily, reason=reason, rollback=rollback,
        timeout_s=timeout_s, as_json=as_json,
    )  # fmt: skip


async def _change(
    at: Attached,
    overrides: tuple[str, ...],
    source: Path | None,
    lazily: bool,
    reason: str,
    rollback: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    from pipeline.operator import updating

    if source is not None:
        change = await updating.update_code(at, source, reason, is_lazy=lazily)
    else:
        change = await (updating.roll_back(at, reason) if rollback else updating.update(at, overrides, reason))
    found = await updating.wait_until_taken(at, change, timeout_s)
    undone = found.undone_by
    value = {"change": change, "taken": found.taken, "is_taken": found.is_taken, "undone_by": undone}
    lines = (
        _lines(change, found.taken, timeout_s) if undone is None else [f"rolled back: {printable_line(undone.reason)}"]
    )
    answer(as_json, value, *lines)
    return 0 if found.is_taken else _NOT_ALL


def _lines(change: SettingsChange, found: list[TakenChange], timeout_s: float) -> list[str]:
    from pipeline.observability.settings_changes import change_words

    lines = [printable_line(change_words(change))]
    for one in found:
        words = f"from update {one.first_update} on" if one.first_update else "uses it"
        if not one.is_taken:
            words = f"did not use it within {timeout_s:g} s; it will when it is back, or between two updates"
        lines.append(f"  {printable_line(one.worker)}: {words}")
    if change.is_lazy:
        lines.append("  each worker uses it once it restarts; after code.lazy_limit_s the others are restarted")
    if change.is_code and not change.undoes:
        lines.append("  the next updates are compared with those before; `headrace update` shows the result")
    return lines


def _show(run_dir: Path, as_json: bool) -> None:
    from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
    from pipeline.observability.settings_changes import change_words, effect_words, effects, read_changes

    changes = read_changes(run_dir)
    rows = run_history(run_dir / HISTORY_NAME).read()[0]
    found = effects(changes, [row for row in rows if isinstance(row, UpdateRow)])
    if as_json:
        echo_json(found)
        return
    if not found:
        click.echo(f"{run_dir} runs with its original settings; `headrace update --set KEY=VALUE` changes one")
    for effect in found:
        change = effect.change
        why = f": {change.reason}" if change.reason else ""
        click.echo(printable_line(change_words(change)))
        click.echo(printable_line(f"  {moment(change.at_s)} by {change.by}{why}"))
        for line in effect_words(effect):
            click.echo(f"  {line}")


def _list(as_json: bool) -> None:
    from pipeline.config.changing import CHANGEABLE

    if as_json:
        rows: list[dict[str, Any]] = [
            {"key": key, "role": one.role, "when": one.when, "effect": one.effect} for key, one in CHANGEABLE.items()
        ]
        echo_json(rows)
        return
    for line in aligned([(key, f"{one.role}, {one.when}", one.effect) for key, one in CHANGEABLE.items()]):
        click.echo(line)
