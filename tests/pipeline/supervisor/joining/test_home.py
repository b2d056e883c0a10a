"""Claims about the way home: lines arrive once, in bounds, and reach no other file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pipeline.observability.regenerated_tokens import FOLDER as TALLIES
from pipeline.process.records import FOLDER as PROCESSES
from pipeline.supervisor.joining.home import MAX_ENTRY_BYTES, HomeEntry, HomePiece, HomeReader, HomeWriter

NAME = "generator-far-x3f9a1-0"


@pytest.fixture
def joined(tmp_path: Path) -> Path:
    for folder in ("logs", TALLIES):
        (tmp_path / "joined" / folder).mkdir(parents=True)
    return tmp_path / "joined"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for folder in ("logs", PROCESSES):
        (tmp_path / "run" / folder).mkdir(parents=True)
    return tmp_path / "run"


def test_lines_and_tallies_arrive_under_the_same_names_and_each_once(joined: Path, run_dir: Path) -> None:
    reader, writer = HomeReader(joined), HomeWriter(run_dir)
    log = joined / "logs" / f"{NAME}.jsonl"
    log.write_text("one\n")
    (joined / TALLIES / f"{NAME}.3").write_bytes(b"x" * 24)
    first = reader.next_entry()
    assert reader.next_entry() == b""
    with log.open("a") as file:
        file.write("two\n")
    for entry in (first, reader.next_entry()):
        writer.write(entry)
    assert (run_dir / "logs" / log.name).read_text() == "one\ntwo\n"
    assert (run_dir / TALLIES / f"{NAME}.3").read_bytes() == b"x" * 24


def test_a_repeated_newest_entry_writes_nothing_twice(joined: Path, run_dir: Path) -> None:
    reader, writer = HomeReader(joined), HomeWriter(run_dir)
    (joined / "logs" / f"{NAME}.out").write_text("one\n")
    entry = reader.next_entry()
    writer.write(entry)
    writer.save()
    HomeWriter(run_dir).write(entry)
    assert (run_dir / "logs" / f"{NAME}.out").read_text() == "one\n"


def test_a_later_join_sends_nothing_of_a_long_log_again(joined: Path, run_dir: Path) -> None:
    reader, writer = HomeReader(joined), HomeWriter(run_dir)
    log = joined / "logs" / f"{NAME}.jsonl"
    log.write_bytes(b"x" * 99 + b"\n" + b"y" * (2 * MAX_ENTRY_BYTES) + b"\n")
    while entry := reader.next_entry():
        writer.write(entry)
    reader.save()
    with log.open("a") as file:
        file.write("later\n")
    later = HomeReader(joined)
    while entry := later.next_entry():
        writer.write(entry)
    assert (run_dir / "logs" / log.name).read_bytes() == log.read_bytes()


def test_what_was_lost_on_the_way_is_marked_by_a_line(joined: Path, run_dir: Path) -> None:
    reader, writer = HomeReader(joined), HomeWriter(run_dir)
    log = joined / "logs" / f"{NAME}.jsonl"
    log.write_text("one\n")
    reader.next_entry()
    with log.open("a") as file:
        file.write("two\n")
    writer.write(reader.next_entry())
    assert (run_dir / "logs" / log.name).read_text() == "[4 bytes did not arrive; the joined host has them]\ntwo\n"


def test_an_entry_is_bounded_and_a_log_that_grows_faster_sends_its_newest_part(joined: Path) -> None:
    (joined / "logs" / f"{NAME}.jsonl").write_bytes(b"x" * (3 << 20) + b"newest\n")
    entry = msgspec.msgpack.decode(HomeReader(joined).next_entry(), type=HomeEntry)
    assert len(entry.pieces[0].data) == MAX_ENTRY_BYTES
    assert entry.pieces[0].data.endswith(b"newest\n")


def test_a_log_that_fills_every_entry_leaves_the_others_their_turn(joined: Path) -> None:
    reader = HomeReader(joined)
    loud, quiet = joined / "logs" / "a-loud-0.jsonl", joined / "logs" / "b-quiet-0.jsonl"
    quiet.write_text("one\n")
    arrived: list[list[str]] = []
    for _ in range(3):
        with loud.open("ab") as file:
            file.write(b"x" * MAX_ENTRY_BYTES)
        entry = msgspec.msgpack.decode(reader.next_entry(), type=HomeEntry)
        arrived.append([piece.name for piece in entry.pieces])
    assert arrived[0] == [loud.name] and arrived[1] == [quiet.name, loud.name]


def test_a_log_that_was_renamed_begins_anew(joined: Path, run_dir: Path) -> None:
    reader, writer = HomeReader(joined), HomeWriter(run_dir)
    log = joined / "logs" / f"{NAME}.jsonl"
    log.write_text("old old old\n")
    writer.write(reader.next_entry())
    log.rename(log.with_suffix(".jsonl.1"))
    log.write_text("new\n")
    writer.write(reader.next_entry())
    assert (run_dir / "logs" / log.name).read_text() == "old old old\nnew\n"


@pytest.mark.parametrize(
    "name",
    ["../../escaped.jsonl", "learner.jsonl", "supervisor.jsonl", "generator-0.jsonl", "a/b.jsonl", "history.json"],
)
def test_an_entry_reaches_no_other_file_and_no_log_of_this_hosts_workers(run_dir: Path, name: str) -> None:
    (run_dir / PROCESSES / "generator-0.json").write_text("{}")
    before = sorted(run_dir.parent.rglob("*"))
    writer = HomeWriter(run_dir)
    tallies = {"generator-0.3": b"x", "../t.3": b"x", "generator-far.json": b"x", "generator-far.3": b"x" * 1000}
    writer.write(msgspec.msgpack.encode(HomeEntry((HomePiece(name, 1, 0, b"x"),), tallies)))
    writer.write(b"no entry at all")
    (run_dir / TALLIES).rmdir()
    assert sorted(run_dir.parent.rglob("*")) == before


def test_a_name_that_no_file_system_takes_blocks_no_other_entry(run_dir: Path) -> None:
    long = HomePiece(f"{'g' * 400}.jsonl", 1, 0, b"a\n")
    before = HomePiece(f"{NAME}.jsonl", 1, -5, b"b\n")
    good = HomePiece(f"{NAME}.out", 1, 0, b"c\n")
    tallies = {f"{NAME}.{'1' * 400}": b"x", f"{NAME}.4": b"y"}
    written = HomeWriter(run_dir).write(msgspec.msgpack.encode(HomeEntry((long, before, good), tallies)))
    assert written.pieces == (good,)
    assert [path.name for path in (run_dir / "logs").iterdir()] == [f"{NAME}.out"]
    assert [path.name for path in (run_dir / TALLIES).iterdir()] == [f"{NAME}.4"]


def test_the_number_of_files_of_joined_hosts_is_bounded(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.supervisor.joining.home._MAX_FILES", 3)
    writer = HomeWriter(run_dir)
    for number in range(5):
        piece = HomePiece(f"generator-{number}.out", 1, 0, b"a\n")
        writer.write(msgspec.msgpack.encode(HomeEntry((piece,), {f"generator-{number}.1": b"x"})))
    assert len(list((run_dir / "logs").iterdir())) == len(list((run_dir / TALLIES).iterdir())) == 3
    more = HomePiece("generator-0.out", 1, 2, b"b\n")
    assert writer.write(msgspec.msgpack.encode(HomeEntry((more,)))).pieces == (more,), "known files go on"
