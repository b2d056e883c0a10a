"""The full-screen view: its text at two sizes, every key, and hostile text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from textual.geometry import Region

from pipeline.ledger.admin import StoredChunk
from pipeline.observability.history import HISTORY_NAME, run_history
from pipeline.operator.top.format import TableRow, plain_line
from pipeline.operator.top.screens import LiveTable
from pipeline.runtime.registry.contract import LinkReport, RunState, RunStatus, WaitingFor
from protocol.errors import LedgerUnavailable
from protocol.ids import Role
from tests.pipeline.ledger.builders import GENERATOR, SCORER, make_chunk, reward
from tests.pipeline.observability.rows import evaluation_row, update_row
from tests.pipeline.observability.test_incidents import line, log
from tests.pipeline.operator.small_run import SmallRun, small_run
from tests.pipeline.operator.top.screen import HandFeed, shown

HOSTILE = "\x1b[2J\x1b]0;t\x07[red]no[/red] [@click=app.quit]x[/]\r\x08"


async def busy_run(folder: Path, *, num_generators: int = 2, **changes: object) -> SmallRun:
    """Make a run with workers of four roles, updates, and an incident."""
    fleet = {Role.LEARNER: 1, Role.GENERATOR: num_generators, Role.REWARD: 1, Role.REFERENCE: 1}
    run = await small_run(folder, fleet=fleet, **changes)
    await beats(run, num_generators=num_generators)
    history = run_history(run.run_dir / HISTORY_NAME)
    for row in (evaluation_row(0, 0, 0.25), update_row(1, accuracy=0.25), update_row(2, accuracy=0.75)):
        history.append(row)
    history.append(evaluation_row(1, 2, 0.5))
    log(run.run_dir, line("worker_exited", 1, level="warning", worker="reward-0", meaning="killed by SIGKILL"))
    log(run.run_dir, line("worker_started", 3, worker="reward-0", pid=3))
    return run


async def beats(run: SmallRun, *, num_generators: int = 2, tokens: int = 1000) -> None:
    await run.beat(Role.LEARNER, "learner", waiting_for=WaitingFor.INPUT, detail="3 of 4 ready", version=2)
    for number in range(num_generators):
        name = f"generator-{number}"
        sent = (LinkReport(name=f"{name}>reward-0", sent=tokens // 100),)
        await run.beat(
            Role.GENERATOR, name, detail="a window", version=2 - number % 2, links=sent, sampled_tokens=tokens
        )
    got = tuple(
        LinkReport(name=f"generator-{n}>reward-0", received=tokens // 100) for n in range(min(8, num_generators))
    )
    await run.beat(Role.REWARD, "reward-0", waiting_for=WaitingFor.INPUT, links=got, scored=tokens // 100)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_the_first_screen_has_all_that_an_operator_asks_first(tmp_path: Path, size: tuple[int, int]) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed, size) as view:
        await feed.run.clock.advance(1.0)
        await beats(feed.run, tokens=2000)
        text = await view.next_picture()
        assert len(view.lines) == size[1]
        assert max(map(len, view.lines)) <= size[0]
        for wanted in (
            "op: running  update 2 of 4  version 0",
            "batch accuracy 75 % ▃▆  held-out 25.0 % → 50.0 %",
            "tokens/s 2,000 sampled",
            "reward +0.00",
            "credit 0 of 8",
            "staleness 0.5, at most 1 of 2",
            "learner waits for generator-0, which is at compute: a window",
            "generator   2/2 2 compute",
            "reference   0/1",
            "ready",
            "reward mailbox",
            "killed by SIGKILL",
            "was started again after 2.0 s",
            "no supervisor: dead workers are not restarted",
            "? help",
        ):
            assert wanted in text, wanted
        if size[0] > 100:
            assert "3 of 4 ready" in text, "a wide screen has the workers beside"


async def test_rates_in_and_out_stand_beside_each_queue(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:
        await feed.run.clock.advance(2.0)
        await beats(feed.run, tokens=2000)
        text = await view.next_picture()
        (reward,) = [row for row in text.splitlines() if " reward  " in row and "mailbox" not in row and "/" not in row]
        assert reward.split()[-4:] == ["0", "5.0", "5.0", "–"]
        await view.press("tab", "end")
        (box,) = [row for row in view.lines if "reward mailbox" in row]
        assert box.split()[-4:] == ["0", "10.0", "10.0", "–"]


async def test_a_long_incident_and_a_large_queue_are_shown_whole_on_a_narrow_screen(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    reason = "; ".join(f"reason {number} of its end" for number in range(1, 7))
    log(feed.run_dir, line("worker_exited", 9, level="warning", worker="generator-1", meaning=reason))
    async with shown(feed, (96, 40)) as view:
        await view.press("5")
        told = [
            row[23:] for row in view.lines[view.lines.index(next(row for row in view.lines if "generator-1" in row)) :]
        ]
        assert " ".join(told).startswith(f"ended ({reason}) was started again")
        await view.press("down", "enter")
        assert "generator-1 has no log yet" in view.text
        await view.press("escape")
        await view.press("1")
        queue = ("credit", "117704/118176", "–", "–", "–")
        view.app.query_one("#queues", LiveTable).show([TableRow("ledger credit", queue)])
        await view.pilot.pause()
        assert " 117704/118176 " in view.text


async def test_each_number_shows_its_view(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:
        text = await view.press("2")
        assert "[2 workers]" in text
        assert "input: 3 of 4 ready" in text
        assert "being started" in text
        text = await view.press("3")
        assert "[3 versions]" in text
        assert "version 2: 1 generator" in text
        assert "newest update: staleness 0.5, at most 1 of 2" in text
        text = await view.press("5")
        assert "[5 incidents]" in text
        assert "killed by SIGKILL" in text
        assert "generator" not in text.split("[5 incidents]")[1]
        assert "[1 run]" in await view.press("1")


async def test_staleness_and_drops_are_those_of_the_ledger(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path, signal_filter=True))
    ledger = feed.run.ledger
    # Of four groups, one has the same reward for both members.
    for lease in (await ledger.lease(GENERATOR, max_trajectories=8)).leases:
        chunk = make_chunk(lease.trajectory)
        await ledger.write_chunk(GENERATOR, chunk)
        accuracy = 1.0 if lease.trajectory.group == 0 else float(lease.trajectory.member % 2)
        await ledger.write_score(SCORER, chunk.id, reward(accuracy))
    async with shown(feed) as view:
        text = await view.press("3")
        assert "staleness of at most 1 is trained on; groups:" in text
        (head,) = [row for row in text.splitlines() if row.startswith("behind")]
        (fresh,) = [row for row in text.splitlines() if row.startswith("     0 ")]
        assert head.split()[:2] == ["behind", "ready"] and fresh.split()[:3] == ["0", "3", "100%"]
        text = await view.press("4")
        (dropped,) = [row for row in text.splitlines() if row.startswith("no signal")]
        assert dropped.split()[:6] == ["no", "signal", "1", "2", "6", "3.0"]


async def test_enter_leads_from_a_role_to_its_workers_and_on_to_a_log(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    path = feed.run_dir / "logs" / "generator-0.jsonl"
    path.write_text(json.dumps({**line("windows", 1, worker="generator-0"), "text": HOSTILE}) + "\n")
    async with shown(feed) as view:
        await view.press("down", "enter")
        table = view.app.query_one("#workers", LiveTable)
        assert table.chosen == "generator-0"
        text = await view.press("enter")
        assert "log of generator-0" in text
        assert "windows" in text
        assert "[red]no[/red]" in text
        with path.open("a") as file:
            file.write(json.dumps(line("swapped", 2, worker="generator-0")) + "\n")
        await view.pilot.pause(1.1)
        assert "swapped" in view.text, "the log is followed"
        await view.press("escape")
        assert "[2 workers]" in view.text


async def test_plus_scales_at_once_and_minus_asks_first(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:
        text = await view.press("down", "plus")
        assert feed.done == ["scale generator +1"]
        assert "done: scale generator +1" in text
        text = await view.press("minus")
        assert "One generator worker fewer?" in text
        assert feed.done == ["scale generator +1"]
        assert "nothing was changed" in await view.press("n")
        await view.press("minus", "escape")
        assert feed.done == ["scale generator +1"]
        await view.press("minus", "y")
        assert feed.done[1:] == ["scale generator -1"]


async def test_pause_asks_first_and_resume_does_not(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:
        assert "Pause the run?" in await view.press("p")
        await view.press("n")
        assert feed.done == []
        await view.press("p", "y")
        assert feed.done == ["pause"]
        await feed.run.admin.pause(by="ada@host", reason="disk [red]work[/red]")
        text = " ".join((await view.next_picture()).split())
        assert "admission is paused by an operator since" in text
        assert "ada@host: disk [red]work[/red]; r resumes" in text
        await view.press("r")
        assert feed.done == ["pause", "resume"]


async def test_a_worker_is_drained_after_a_question(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:
        assert "choose a worker first" in await view.press("d")
        text = await view.press("2", "down", "down", "d")
        assert "Drain generator-1?" in text
        await view.press("n")
        assert feed.done == []
        assert "done: drain generator-1" in await view.press("d", "y")
        assert feed.done == ["drain generator-1"]


async def test_a_refused_change_says_why_and_the_view_goes_on(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    feed.refusal = f"the fleet is too large {HOSTILE}"
    async with shown(feed) as view:
        text = await view.press("plus")
        assert "the fleet is too large" in text
        assert "[red]no[/red]" in text
        await view.press("tab", "plus")
        assert "choose a role or a worker" in view.text


async def test_help_lists_every_key_that_is_bound(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed, (80, 60)) as view:
        text = await view.press("question_mark")
        for wanted in (
            "1 to 5",
            "+ and -",
            "Enter",
            "Tab",
            "  l  ",
            "  t  ",
            "  d  ",
            "  p  ",
            "  r  ",
            "  q  ",
            "Ctrl-C",
            "Escape",
        ):
            assert wanted in text, wanted
        assert max(map(len, view.lines)) <= 80
        assert "[1 run]" in await view.press("escape")


async def test_a_trajectory_is_chosen_or_named_and_shown_as_text(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    feed.chunks = (StoredChunk("t.1.0.0", 12, 3.0, True, ()),)
    feed.lives = {"t.1.0.0": ["prompt 1+1=", HOSTILE], "t.2.1": ["another"]}
    async with shown(feed) as view:
        assert "t.1.0.0" in await view.press("t")
        text = await view.press("enter")
        assert "prompt 1+1=" in text
        assert "[red]no[/red]" in text
        assert "\x1b" not in text
        await view.press("escape")
        text = await view.press("slash", *"t.2.1", "enter")
        assert "another" in text
        await view.press("escape", "escape")
        text = await view.press("slash", *"x", "enter")
        assert "x is not in the ledger" in text
        await view.press("escape", "escape")
        assert "[1 run]" in view.text


async def test_what_workers_write_is_text_on_every_view(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    await feed.run.beat(Role.GENERATOR, f"generator-{HOSTILE}", detail=HOSTILE)
    log(feed.run_dir, line("odd", 5, level="error", worker="supervisor", reason=HOSTILE))
    await feed.run.registry.set_run_status(RunStatus(RunState.RUNNING, HOSTILE))
    async with shown(feed, (200, 60)) as view:
        for key in "12345":
            text = await view.press(key)
            assert not set(text) & set("\x1b\x07\r\x08"), key
            assert view.app.is_running
        assert "[red]no[/red]" in await view.press("1")


async def test_a_table_escapes_what_its_rows_have_not(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:
        table = view.app.query_one("#roles", LiveTable)
        table.show([TableRow("learner", (HOSTILE, "1/1", HOSTILE))])
        await view.pilot.pause()
        assert "\\x1b" in view.text
        assert not set(view.text) & set("\x1b\x07\r\x08")


async def test_the_ends_of_run_and_server_do_not_end_the_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:

        async def away(*_: object) -> None:
            raise LedgerUnavailable("the server is being started again")

        monkeypatch.setattr(feed.run.ledger, "totals", away)
        text = await view.next_picture()
        assert "the ledger does not answer, for 0 s: the server is being started again" in text
        assert "generator   2/2" in text, "the last picture stays"
        monkeypatch.undo()
        assert "does not answer" not in await view.next_picture()
        for worker in ("learner", "generator-0", "generator-1", "reward-0"):
            await feed.run.registry.fence(worker)
        await feed.run.registry.set_run_status(RunStatus(RunState.FINISHED, "4 updates done"))
        assert "the run has ended, finished: 4 updates done" in await view.next_picture()
        await feed.run.registry.set_run_status(RunStatus(RunState.STOPPING, "by a person"))
        text = await view.next_picture()
        assert "the run has ended, stopped: by a person" in text and "op: stopped  update 2 of 4" in text
        assert view.app.picture is not None and " left" not in plain_line(view.app.picture)
        assert view.app.is_running


async def test_readings_never_overlap_however_slow_the_ledger(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:
        # The next picture is not wanted yet.
        await view.pilot.pause(0.05)
        await view.pilot.press("2")
        assert (feed.num_reading, feed.most_reading) == (1, 1)
        assert "[2 workers]" in view.text, "keys work while the ledger is awaited"
        await view.next_picture()
        assert feed.most_reading == 1


async def test_changed_lines_alone_are_drawn_and_the_cursor_stays_on_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = HandFeed(await busy_run(tmp_path, num_generators=200))
    async with shown(feed) as view:
        await view.press("2", *["down"] * 5)
        table = view.app.query_one("#workers", LiveTable)
        chosen = table.chosen
        drawn: list[object] = []
        refresh = table.refresh
        monkeypatch.setattr(table, "refresh", lambda *what, **_: drawn.append(what) or refresh(*what))
        await view.next_picture()
        assert drawn == []
        await feed.run.beat(Role.GENERATOR, "generator-7", detail="another window", version=2)
        text = await view.next_picture()
        assert drawn == [(Region(0, 9, 80, 1),)], "the header, the learner, and seven generators stand above"
        assert "another window" in text
        assert "worker 1-13/203" in text, "which rows are in sight"
        # A worker before the chosen one goes.
        await feed.run.registry.fence("generator-0")
        await view.next_picture()
        assert table.chosen == chosen


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_q_and_ctrl_c_leave_the_view_alone(tmp_path: Path, key: str) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed) as view:
        await view.pilot.press(key)
        await view.pilot.pause()
        assert view.app.return_value == 0
    assert feed.done == []


async def test_beside_the_supervisor_ctrl_c_is_handed_to_it_and_the_view_stays(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    told: list[str] = []
    async with shown(feed, on_interrupt=lambda: told.append("interrupt")) as view:
        await view.pilot.press("ctrl+c")
        await view.pilot.press("ctrl+c")
        assert told == ["interrupt", "interrupt"]
        assert view.app.is_running
        assert "drain the run and end it" in await view.press("question_mark", "end")


async def test_without_colours_the_words_say_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    feed = HandFeed(await busy_run(tmp_path))
    await feed.run.clock.advance(60.0)
    await feed.run.beat(Role.LEARNER, "learner")
    async with shown(feed) as view:
        assert view.app.no_color
        assert "2 unwell" in view.text
        assert "! silent for 60 s" in await view.press("2")


async def test_a_terminal_may_change_its_size(tmp_path: Path) -> None:
    feed = HandFeed(await busy_run(tmp_path))
    async with shown(feed, (200, 60)) as view:
        for size in ((80, 24), (40, 12), (120, 30)):
            await view.pilot.resize_terminal(*size)
            await view.next_picture()
            assert len(view.lines) == size[1]
            assert max(map(len, view.lines)) <= size[0]
    assert asyncio.get_running_loop().is_running()
