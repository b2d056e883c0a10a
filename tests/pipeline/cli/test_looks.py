"""Claims about ``headrace ledger groups``, ``versions`` and ``drops``, and about ``--watch`` of all
commands that look, on a run with work of every kind."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.cli.top import life
from pipeline.ledger.inspection import DropsView, EndedRow, ResponseTally
from pipeline.ledger.server.embedded import open_ledger
from pipeline.ledger.types import Claim
from pipeline.observability.samples import SAMPLES_NAME, ResponseSample, response_samples
from pipeline.observability.tables import drops_lines, drops_table
from pipeline.operator.attached import Attached, look_at
from pipeline.runtime.registry.contract import RunState, RunStatus
from pipeline.supervisor.run_folder import run_lock
from protocol.errors import ConfigError
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.printable import printable
from tests.pipeline.ledger.builders import make_chunk, reward
from tests.pipeline.made_run import stopped_run

pytestmark = pytest.mark.timeout(90)
_HOSTILE = "generator-\x1b[2J"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an update trained, a group without signal dropped, and one open."""

    async def leave_work_behind(at: Attached) -> None:
        who = await at.registry.register(Role.GENERATOR, "generator-0")
        learner = await at.registry.register(Role.LEARNER, "learner")
        scorer = Incarnation(Role.REWARD, "reward-9", 1)
        leases = (await at.ledger.lease(who, max_trajectories=64)).leases
        size = 1 + max(lease.trajectory.member for lease in leases)
        groups = 1 + max(lease.trajectory.group for lease in leases)
        claim = None
        for group in range(groups - 1):
            for member in range(size):
                name = TrajectoryId("t", group, member)
                await at.ledger.write_chunk(who, make_chunk(name, tokens=4 + group))
                accuracy = 1.0 if group == 1 else float(member % 2)
                await at.ledger.write_score(scorer, ChunkId(name, 0), reward(accuracy))
            claim = await at.ledger.claim(learner, policy_version=0)
            if isinstance(claim, Claim):
                await at.ledger.settle(learner, (claim.claim_id,), num_updates=1)
                break
        assert isinstance(claim, Claim), claim

    return stopped_run(tmp_path_factory.mktemp("looked"), leave_work_behind)


def _text(*words: str) -> str:
    done = CliRunner().invoke(headrace, list(words), standalone_mode=False, catch_exceptions=False)
    return done.output


def _json(*words: str) -> Any:
    return json.loads(_text(*words, "--json"))


def _start(*words: str, **pipes: Any) -> Any:
    code = "import sys; from pipeline.cli import main; main(sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", code, *words], **pipes)


def test_open_groups_show_what_each_member_waits_for(run_dir: Path) -> None:
    found = _json("ledger", "groups", str(run_dir))
    group = found["groups"][0]
    assert group["num_done"] + group["num_left"] + len(group["waited"]) == found["group_size"]
    lines = _text("ledger", "groups", "--limit", "1", str(run_dir)).splitlines()
    assert f"{found['num_groups']:,} groups of {found['group_size']} in the ledger" in lines[0]
    assert lines[1].split() == ["group", "since", "done", "left", "the", "rest", "waits", "for", "tokens", "since"]
    row = " ".join(lines[2].split())
    assert row.startswith(f"{group['number']} ")
    assert f"0 of {found['group_size']} t.{group['number']}.0 .1" in row
    assert "generator-0#1" in row
    assert max(map(len, lines)) <= 80


def test_versions_and_drops_show_what_was_trained_beside_what_was_dropped(run_dir: Path) -> None:
    versions = _json("ledger", "versions", str(run_dir))
    assert versions["trained"].keys() == {"0"}
    assert versions["dropped"] == {"no_signal": {"0": 1}}
    table = _text("ledger", "versions", str(run_dir)).splitlines()
    assert table[0].startswith("version 0; staleness of at most")
    assert table[1].split() == ["behind", "ready", "running", "claimed", "trained", "no", "signal"]
    drops = _json("ledger", "drops", str(run_dir))
    assert drops["trained"]["mean_difficulty"] == 0.5
    (dropped,) = drops["dropped"]
    assert (dropped["reason"], dropped["mean_length"], dropped["mean_difficulty"]) == ("no_signal", 5.0, 0.0)
    assert drops["warnings"] == []
    assert [line.split()[0] for line in _text("ledger", "drops", str(run_dir)).splitlines()[1:]] == ["trained", "no"]


def test_a_life_is_told_in_the_order_of_time_up_to_the_update_that_trained_on_it(run_dir: Path) -> None:
    found = _json("ledger", "trajectory", "t.2.1", str(run_dir))
    assert (found["life"]["state"], found["life"]["end"]["num_updates"], found["sample"]) == ("trained", 0, None)
    head, day, *lines = _text("ledger", "trajectory", "t.2.1", "--run", str(run_dir)).splitlines()
    assert head == "t.2.1: trained, 6 tokens in 1 chunk, prompt 2"
    assert day.endswith(", by the ledger server's clock:")
    events = [line.split(" s  ", 1)[1] for line in lines]
    assert events == [
        "admitted",
        "leased by generator-0#1",
        "chunk 0: 6 tokens of version 0, by generator-0#1",
        "chunk 0: reward +1.00, accuracy 1, by reward-9#1",
        "ready",
        "claimed by the learner",
        "trained on by update 1, 0 versions behind",
    ]
    dropped = _text("ledger", "trajectory", "t.1.0", "--run", str(run_dir))
    assert "dropped: no_signal, 0 versions behind" in dropped
    assert max(len(line) for line in (head, *lines, *dropped.splitlines())) <= 80


def test_trace_shows_the_life_of_a_trajectory_as_its_own_command_does(run_dir: Path) -> None:
    assert _json("run", "trace", "t.2.1", str(run_dir)) == _json("ledger", "trajectory", "t.2.1", str(run_dir))
    assert _text("run", "trace", "t.2.1", "--run", str(run_dir)) == _text(
        "ledger", "trajectory", "t.2.1", "--run", str(run_dir)
    )


def test_top_shows_a_trajectorys_life_after_it_has_left_and_its_chunks_before(run_dir: Path) -> None:
    async def shown(name: str) -> str:
        async with look_at(run_dir) as at:
            return "\n".join(await life(at, name))

    trained, opened = asyncio.run(shown("t.0.0")), asyncio.run(shown("t.2.0"))
    assert "trained on by update" in trained and "by generator-0" in trained
    assert "leased by generator-0" in opened
    assert "\x1b" not in trained + opened
    with pytest.raises(ConfigError, match=r"t\.999\.0"):
        asyncio.run(shown("t.999.0"))


def test_a_kept_sample_has_the_text_of_a_life_and_acts_on_no_terminal(run_dir: Path) -> None:
    sample = ResponseSample(
        update=1,
        policy_version=1,
        trajectory="t.3.0",
        prompt="1+1=",
        answer="2",
        verifier="arithmetic",
        response="<script>\x1b[2J",
        num_tokens=7,
        finish_reason="stop",
        versions=(0, 0),
        reward=1.0,
        accuracy=1.0,
    )
    response_samples(run_dir).append(sample)
    try:
        text = _text("ledger", "trajectory", "t.3.0", "--run", str(run_dir))
        assert "response <script>\\x1b[2J" in text
        assert _json("ledger", "trajectory", "t.3.0", "--run", str(run_dir))["sample"]["prompt"] == "1+1="
    finally:
        (run_dir / SAMPLES_NAME).unlink()


def test_an_unknown_trajectory_is_answered_with_what_exists(run_dir: Path) -> None:
    for name, words in (
        ("t.9999.0", "groups are admitted; groups "),
        ("t.0.99", "members of a group are 0 to"),
        ("e5.0.0", "evaluation responses are known while they are in the ledger"),
        ("nonsense", "expected LANE.GROUP.MEMBER"),
    ):
        with pytest.raises(ConfigError, match=words):
            headrace.main(["ledger", "trajectory", name, "--run", str(run_dir)], standalone_mode=False)


def test_the_tables_fit_80_columns_with_figures_of_a_long_run() -> None:
    from rich.console import Console

    tally = ResponseTally(12_345_678, 98_765_432_109, 10**15, 12_345_678, 10**12)
    row = EndedRow("dead_letter", 1_543_209, 12_345_678, 98_765_432_109, tally)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(drops_table(DropsView(row, (row,), 8)))
    text = console.export_text()
    assert "12,345,678" in text
    assert "…" not in text


def test_a_run_without_ended_work_says_so_and_warnings_stand_below_the_table() -> None:
    nothing = EndedRow("", 0, 0, 0)
    assert list(drops_lines(DropsView(nothing, (), 8))) == ["nothing was trained on or dropped yet"]
    short, long = (ResponseTally(400, 400 * length, 400 * length * length) for length in (10, 20))
    found = DropsView(EndedRow("", 50, 400, 4000, short), (EndedRow("stale", 50, 400, 8000, long),), 8)
    _, warning = drops_lines(found)
    assert warning == f"warning: {found.warnings[0]}"


@pytest.mark.parametrize("command", [["status"], ["why"], ["ledger", "drops"]], ids=" ".join)
def test_a_watch_that_is_piped_repeats_the_look_and_ends_cleanly_by_ctrl_c(run_dir: Path, command: list[str]) -> None:
    watch = _start(*command, str(run_dir), "--watch", "0.2", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert watch.stdout is not None
    looks = [json.loads(watch.stdout.readline()) for _ in range(2)]
    watch.send_signal(signal.SIGINT)
    _, errors = watch.communicate(timeout=20)
    assert (watch.returncode, errors) == (0, b"")
    assert looks[0]
    assert type(looks[0]) is type(looks[1])


@pytest.mark.parametrize("command", ["status", "why"])
def test_a_watch_of_a_stopped_run_copies_it_once_and_follows_it_when_it_is_resumed(
    run_dir: Path, tmp_path: Path, command: str
) -> None:
    watched = tmp_path / "run"
    shutil.copytree(run_dir, watched)
    # a short path, since a server's socket is in it
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        _watch_through_a_resume(watched, Path(folder), command)


def _watch_through_a_resume(watched: Path, folder: Path, command: str) -> None:
    environment = {**os.environ, "TMPDIR": str(folder)}
    watch = _start(command, str(watched), "--watch", "0.2", "--json", stdout=subprocess.PIPE, env=environment)
    assert watch.stdout is not None

    def state() -> str:
        look = json.loads(watch.stdout.readline())
        return look.get("state") or look["status"]["state"]

    try:
        copies = set()
        for _ in range(3):
            assert state() == "stopping"
            copies |= set(folder.glob("headrace-look-*"))
        assert len(copies) == 1, "each look made a copy of its own"
        server = open_ledger(watched, configured_url=None, max_memory_mb=64)
        assert server is not None
        try:
            asyncio.run(_set_running(watched))
            with run_lock(watched):
                deadline = time.monotonic() + 20.0
                while state() != "running":
                    assert time.monotonic() < deadline, "it shows the old state"
                assert not list(folder.glob("headrace-look-*")), "its copy is left"
        finally:
            server.stop()
    finally:
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=20)


async def _set_running(run_dir: Path) -> None:
    async with look_at(run_dir) as at:
        await at.registry.set_run_status(RunStatus(RunState.RUNNING))


def test_a_watch_ends_when_its_reader_does(run_dir: Path) -> None:
    watch = _start("ledger", "versions", str(run_dir), "--watch", "0.2", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert watch.stdout is not None
    assert watch.stdout.readline().startswith(b"version 0;")
    watch.stdout.close()
    assert watch.wait(timeout=20) == 0
    assert watch.stderr is not None
    with watch.stderr as errors:
        assert errors.read() == b""


def test_a_watch_on_a_terminal_redraws_in_place_and_gives_the_screen_back(run_dir: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    watch = _start(
        "ledger", "drops", str(run_dir), "--watch", "0.2", stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen, until = b"", time.monotonic() + 30
    while seen.count(b"Ctrl-C ends") < 3 and time.monotonic() < until:
        if select.select([ours], [], [], 0.5)[0]:
            seen += os.read(ours, 65536)
    watch.send_signal(signal.SIGINT)
    while select.select([ours], [], [], 10)[0]:
        try:
            seen += os.read(ours, 65536)
        except OSError:
            break
    assert watch.wait(timeout=20) == 0
    os.close(ours)
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
    assert seen.count(b"Ctrl-C ends") >= 3
    assert b"Traceback" not in seen


@pytest.mark.parametrize("word", ["0", "soon", "runs/demo"])
def test_watch_refuses_what_is_no_number_of_seconds(word: str) -> None:
    done = CliRunner().invoke(headrace, ["ledger", "drops", "--watch", word])
    assert done.exit_code == 2
    assert "expected seconds of at least 0.2" in done.output


def test_a_worker_with_a_hostile_name_acts_on_no_terminal() -> None:
    from rich.console import Console

    from pipeline.cli.ledger_views import groups_table
    from pipeline.ledger.admin import Place, WaitedTrajectory
    from pipeline.ledger.inspection import GroupsView, OpenGroup
    from pipeline.ledger.types import Unit

    one = WaitedTrajectory("t.0.0", Place.LEASED, _HOSTILE, 1, 3, 2.0, ())
    view = GroupsView(Unit.GROUP, 1, 1, 1, (OpenGroup(0, 0, 1.0, 0, 0, "", (one,)),))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(groups_table(view))
    text = console.export_text()
    assert "\x1b" not in text
    assert printable(_HOSTILE) in text.replace("\n", "")
