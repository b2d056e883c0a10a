"""``headrace why``: print what the run waits for, as a chain from the learner to the root cause.

``pipeline.fleet.why`` finds the answer from heartbeats, the ledger's views, and the
supervisor's log, which has the exits of absent workers. A ledger that does not answer is a root
cause, too."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import echo_json, json_option, run_argument
from pipeline.cli.watch_option import Connected, Picture, keep_looking, watch_option
from pipeline.operator.attached import find_run
from protocol.errors import LedgerRefused, LedgerUnavailable
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.fleet.why.types import Explanation, Snapshot
    from pipeline.operator.attached import Attached

_LOOK_S = 4.0
"""Time limit of all answers of the ledger together."""
_STYLES = {"moves": "green", "mends": "yellow", "you": "red", "ended": "cyan"}
_WORDS = ("nothing is wrong", "it recovers by itself", "it needs you", "it has ended, or is ending")
_VERDICTS = dict(zip(_STYLES, _WORDS, strict=True))


@click.command(
    epilog="\b\nExamples:\n  headrace why\n  headrace why runs/demo --json\n  headrace why --watch\n\n"
    "Exit code 0; 3 when the ledger does not answer."
)
@run_argument
@json_option
@watch_option
def why(run: Path | None, as_json: bool, every_s: float | None) -> int:
    """Explain what the run waits for, from the learner back to the cause, and what to do."""
    run_dir = find_run(run)
    connected = Connected(run_dir, _snapshot)
    if every_s is not None:
        return keep_looking(lambda: _look_again(run_dir, connected), every_s, as_json=as_json, close=connected.aclose)
    picture = _unanswered(run_dir)
    if picture is None:
        import asyncio

        picture = asyncio.run(_look_once(run_dir, connected))
    if as_json:
        echo_json(picture.value)
    else:
        click.echo("\n".join(str(line) for line in picture.shown()))
    return picture.code


def _unanswered(run_dir: Path) -> Picture | None:
    """Return the answer if the ledger is already known not to answer, else None."""
    from pipeline.fleet.why.silence import no_ledger_chain, silence
    from pipeline.fleet.why.types import Explanation
    from pipeline.supervisor.run_folder import supervisor_pid

    is_supervised = supervisor_pid(run_dir) is not None
    error = silence(run_dir, is_supervised=is_supervised)
    if error is None:
        return None
    snapshot = _without_ledger(run_dir, error, is_supervised)
    return _picture(run_dir, snapshot, Explanation.of([no_ledger_chain(snapshot)]))


async def _look_again(run_dir: Path, connected: Connected[Snapshot]) -> Picture:
    import asyncio

    return await asyncio.to_thread(_unanswered, run_dir) or await _look(run_dir, connected)


async def _look_once(run_dir: Path, connected: Connected[Snapshot]) -> Picture:
    try:
        return await _look(run_dir, connected)
    finally:
        await connected.aclose()


async def _look(run_dir: Path, connected: Connected[Snapshot]) -> Picture:
    from pipeline.fleet.why.explain import explain

    try:
        snapshot = await connected.draw()
    except (LedgerUnavailable, LedgerRefused) as unavailable:
        from pipeline.fleet.why.silence import whereabouts
        from pipeline.supervisor.run_folder import supervisor_pid

        is_supervised = supervisor_pid(run_dir) is not None
        snapshot = _without_ledger(run_dir, f"{unavailable}{whereabouts(run_dir)}", is_supervised)
    return _picture(run_dir, snapshot, explain(snapshot))


def _picture(run_dir: Path, snapshot: Snapshot, found: Explanation) -> Picture:
    """Return the answer; its lines are styled for a terminal."""
    answer = {"headline": found.headline, "outlook": found.outlook, "chains": found.chains, "also": found.also}
    width = max(40, min(120, shutil.get_terminal_size((100, 24)).columns))
    value = {"run": run_dir, "state": snapshot.state, **answer}
    return Picture(value, lambda: render(snapshot, found, width), 0 if snapshot.waits is not None else 3)


async def _snapshot(at: Attached) -> Snapshot:
    import asyncio

    from pipeline.operator.run_snapshot import snapshot_of

    try:
        async with asyncio.timeout(_LOOK_S):
            return await snapshot_of(at)
    except TimeoutError as error:
        raise LedgerUnavailable(f"its server did not answer within {_LOOK_S:g} s") from error


def _without_ledger(run_dir: Path, error: str, is_supervised: bool) -> Snapshot:
    from pipeline.fleet.why.types import Snapshot
    from pipeline.runtime.registry.contract import RunState

    return Snapshot(str(run_dir), RunState.RUNNING, "", is_supervised, ledger_error=error)


def render(snapshot: Snapshot, found: Explanation, width: int) -> list[str]:
    """Return the answer as lines of at most ``width`` characters, styles aside."""
    version = f", version {snapshot.waits.policy_version}" if snapshot.waits else ""
    supervised = "" if snapshot.has_supervisor else ", no supervisor"
    verdict = click.style(_VERDICTS[found.outlook], fg=_STYLES[found.outlook], bold=True)
    lines = [f"{printable_line(snapshot.run)}: {snapshot.state}{version}{supervised}; {verdict}"]
    for chain in found.chains:
        lines.append("")
        for depth, link in enumerate(chain.links):
            indent = "" if depth == 0 else "  " * (depth - 1) + "└ "
            many = f", and {chain.num_units - 1} more like it" if depth == 1 and chain.num_units > 1 else ""
            is_root = depth == len(chain.links) - 1
            hanging = " " * (len(indent) + 2)
            words = printable_line(link) + many
            wrapped = textwrap.wrap(words, width, initial_indent=indent, subsequent_indent=hanging)
            lines += [click.style(line, fg=_STYLES[chain.outlook]) if is_root else line for line in wrapped]
        lines += textwrap.wrap(f"→ {printable_line(chain.next)}", width, subsequent_indent="  ")
    if found.also:
        lines.append("")
        for words in found.also:
            lines += textwrap.wrap(f"also: {printable_line(words)}", width, subsequent_indent="      ")
    return lines
