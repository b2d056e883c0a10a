"""No command lets text from others act on the terminal: not on its cursor, colours, title or
direction of text."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import click
import msgpack
import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from pipeline.cli import headrace, main, requeue, why
from pipeline.cli.peek import as_text, show
from pipeline.fleet.flow.bottleneck import bottleneck
from pipeline.fleet.limits import Limits
from pipeline.fleet.state import Worker, read_once
from pipeline.fleet.status import RunSnapshot, queue_rows, worker_rows
from pipeline.fleet.why.explain import explain
from pipeline.fleet.why.types import Cause, Chain, Explanation, Outlook, Snapshot
from pipeline.ledger.types import DeadLetter, QueueStat
from pipeline.observability.live_view import Notices, last_picture
from pipeline.observability.progress import RunProgress
from pipeline.observability.samples import ResponseSample, response_samples
from pipeline.observability.tables import fleet_table, queue_table
from pipeline.runtime.log import open_log
from pipeline.runtime.registry.contract import LinkReport, RunState, RunStatus
from protocol.errors import DataError
from protocol.ids import Incarnation, Role, TrajectoryId
from protocol.peek import peek
from tests.pipeline.ledger.builders import make_chunk, reward
from tests.pipeline.observability.test_live_view import TOTALS, _beat

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egniht\r\x08[/nothing] [red]"
ACTS = set("\x1b\x07\x9b\u202e\r\x08")


def beats() -> list[Worker]:
    who = Incarnation(Role.GENERATOR, f"generator-{HOSTILE}", 1)
    links = (LinkReport(name=f"mallory{HOSTILE}>reward-0", sent=1),)
    return [
        replace_struct(_beat(Role.GENERATOR, "generator-0"), who=who, host=HOSTILE, detail=HOSTILE, links=links),
        _beat(Role.LEARNER, "learner"),
    ]


def replace_struct(beat: Worker, **changes: object) -> Worker:
    return msgspec.structs.replace(beat, **changes)


def page(*what: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    for one in what:
        console.print(one, highlight=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


def letter() -> DeadLetter:
    return DeadLetter(chunk="t.1.0.0", role="reward", error=f"KeyError\n{HOSTILE}", prompt=1, num_attempts=3, at_s=0.0,
                      worker=f"reward{HOSTILE}")  # fmt: skip


def of_status(_: Path, __: pytest.MonkeyPatch) -> str:
    rows = worker_rows(read_once(beats(), Limits(60.0, 100.0)))
    console = Console(file=io.StringIO(), width=160)
    # as the command has it
    console.print(bottleneck(rows), highlight=False, markup=False)
    return page(fleet_table(rows)) + console.file.getvalue()  # type: ignore[attr-defined]


def of_queues(_: Path, __: pytest.MonkeyPatch) -> str:
    return page(queue_table(queue_rows(beats(), [QueueStat(f"ready{HOSTILE}", 1, 2, 3.0, HOSTILE)])))


def of_why(folder: Path, _: pytest.MonkeyPatch) -> str:
    rows = worker_rows(read_once(beats(), Limits(60.0, 100.0)))
    seen = Snapshot(f"runs/{HOSTILE}", RunState.RUNNING, HOSTILE, True, workers=rows, ledger_error=HOSTILE)
    chain = Chain((HOSTILE, HOSTILE), Cause.LEDGER, HOSTILE, Outlook.YOU, HOSTILE)
    made = Explanation(HOSTILE, Outlook.YOU, (chain,), (HOSTILE,))
    return click.unstyle("\n".join(why.render(seen, explain(seen), 100) + why.render(seen, made, 100)))


def of_dead_letters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    async def read(*_: object) -> list[DeadLetter]:
        return [letter()]

    monkeypatch.setattr(requeue, "_read", read)
    listed = CliRunner().invoke(requeue.dead_letters, ["list"], catch_exceptions=False).output
    return listed + CliRunner().invoke(requeue.dead_letters, ["show", "t.1.0.0"], catch_exceptions=False).output


def of_peek(_: Path, __: pytest.MonkeyPatch) -> str:
    console = Console(file=io.StringIO(), width=160)
    chunk = make_chunk(TrajectoryId("t", 1, 0))
    prompt = msgspec.structs.replace(chunk.prompt, text=HOSTILE, answer=HOSTILE, verifier=HOSTILE)
    chunk = msgspec.structs.replace(chunk, worker=HOSTILE, prompt=prompt)
    score = msgspec.structs.replace(reward(), parts={HOSTILE: 1.0})
    console.file.write("\n".join(as_text(chunk, [score], HOSTILE)))
    show(peek([msgpack.packb({HOSTILE: HOSTILE, "body": {"prompt": {"text": HOSTILE}}}) or b""]), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def of_samples(folder: Path, _: pytest.MonkeyPatch) -> str:
    sample = ResponseSample(
        update=1,
        policy_version=1,
        trajectory=HOSTILE,
        prompt=HOSTILE,
        answer=HOSTILE,
        verifier=HOSTILE,
        response=f"1\n{HOSTILE}",
        num_tokens=1,
        finish_reason=HOSTILE,
        versions=(0, 0),
        reward=1.0,
        accuracy=0.5,
        parts={HOSTILE: 1.0, "b": 0.0},
    )
    (folder / "config.toml").touch()
    response_samples(folder).append(sample)
    shown = [CliRunner().invoke(headrace, ["samples", str(folder), *more]).output for more in ([], ["--json"])]
    return click.unstyle("".join(shown))


def of_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def fails(*_: object, **__: object) -> None:
        raise DataError(f"train.jsonl:3: {HOSTILE}")

    monkeypatch.setattr("pipeline.cli.headrace.main", fails)
    told = io.StringIO()
    monkeypatch.setattr("sys.stderr", told)
    with pytest.raises(SystemExit):
        main(["status"])
    return told.getvalue()


def of_a_log_line(folder: Path, _: pytest.MonkeyPatch) -> str:
    terminal = io.StringIO()
    log = open_log(folder, role=Role.REWARD, worker="reward-0", run="demo", terminal=terminal)
    log.logger.warning("scoring_failed", error=HOSTILE, chunk=HOSTILE, **{f"k{HOSTILE}": 1})
    log.close()
    return terminal.getvalue() + (folder / "logs" / "reward-0.jsonl").read_text()


def of_the_last_picture(_: Path, __: pytest.MonkeyPatch) -> str:
    notices = Notices()
    notices.write(f"warning {HOSTILE}")
    snapshot = RunSnapshot(RunStatus(RunState.RUNNING, HOSTILE), beats(), TOTALS)
    return page(last_picture("op", RunProgress.of([], 4), snapshot, "0:00", notices.lines))


OUTPUTS: dict[str, Callable[[Path, pytest.MonkeyPatch], str]] = {
    "status": of_status,
    "queues": of_queues,
    "why": of_why,
    "dead-letters": of_dead_letters,
    "peek": of_peek,
    "samples": of_samples,
    "an error": of_an_error,
    "a log line": of_a_log_line,
    "the last picture of up": of_the_last_picture,
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_text_of_others_never_acts_on_the_terminal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = OUTPUTS[name](tmp_path, monkeypatch)
    # it is shown
    assert "gniht" in shown
    assert not set(shown) & ACTS
