"""Claims about a run's copies: whole or not there, true to their digests, and enough to go on."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from pipeline.config.load import read_resolved
from pipeline.files.object_store import ObjectStore
from pipeline.ledger.address import LedgerAddress, known_url, write_address
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.observability.fleet_history import FLEET_HISTORY_NAME
from pipeline.observability.history import HISTORY_NAME, VALUE_HISTORY_NAME
from pipeline.observability.prompt_accuracies import EVALUATIONS_NAME
from pipeline.observability.regenerated_tokens import FOLDER
from pipeline.observability.samples import SAMPLES_NAME
from pipeline.observability.sinks.pump import FOLDER as SINKS
from pipeline.observability.sinks.seam import REMOTE
from pipeline.observability.start_record import STARTS_NAME
from pipeline.training.checkpoints import latest_checkpoint
from pipeline.training.mirror import staging
from pipeline.training.mirror.fetching import fetch_run
from pipeline.training.mirror.layout import RECORDS, TALLIES, list_copies, read_copy
from pipeline.training.mirror.staging import SEGMENT_KEY, STAGING
from protocol.errors import ConfigError, DataError, Fenced, StorageFailed, StoreUnavailable
from tests.pipeline.training.mirror.mirrored import VALUE_CHECKPOINTS, MirroredRun, mirrored_run
from workers.learner import update_recorder


@pytest.fixture
def run(tmp_path: Path) -> MirroredRun:
    return mirrored_run(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fetched_copy_has_what_a_resume_needs_and_no_secret_or_log(run: MirroredRun) -> None:
    run.checkpoint(3)
    run.checkpoint(6, segment=3)
    run.checkpoint(1, kind=VALUE_CHECKPOINTS)
    made = run.copy()
    assert made is not None and (made.checkpoint, made.version) == ("000002.version-6", 6)
    folder, copy = fetch_run(run.url, run.folder / "elsewhere")
    assert folder == run.folder / "elsewhere" / "op" and copy == made
    here, there = contents(run.run_dir), contents(folder)
    found = latest_checkpoint(folder / "checkpoints")
    assert found is not None and found.version == 6
    assert latest_checkpoint(folder / "value-checkpoints") is not None
    assert {name for name in there if name.startswith("updates")} == {
        "updates/000001.epoch-1.log",
        "updates/000002.epoch-1.log",
    }, "the segment after the checkpoint is not ended"
    assert {name for name in here if name.startswith(("ledger/append", "tallies"))} <= set(there)
    assert there["history.jsonl"] == here["history.jsonl"]
    assert all(there[name] == here[name] for name in there)
    everything = b"".join(there.values()) + b"".join(contents(run.bucket).values())
    for hidden in (b"curve-of-a-test", b"log-of-a-test", b"password-of-a-test"):
        assert hidden not in everything
    assert {path.stat().st_mode & 0o077 for path in folder.rglob("*")} == {0}


def test_the_names_of_records_are_those_of_their_writers() -> None:
    histories = {HISTORY_NAME, VALUE_HISTORY_NAME, FLEET_HISTORY_NAME, EVALUATIONS_NAME, SAMPLES_NAME, STARTS_NAME}
    sinks = {f"{SINKS}/{sink}.json" for sink in REMOTE}
    assert {*histories, *sinks, "report.html", "report.json"} == set(RECORDS)
    assert TALLIES == FOLDER
    assert SEGMENT_KEY == update_recorder.SEGMENT_KEY


def test_a_copy_that_is_cut_off_is_none_and_the_next_one_takes_up_what_is_there(
    run: MirroredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.checkpoint(3)
    run.copy()
    run.checkpoint(6)
    put, num_left = ObjectStore.put, 2

    def fail_soon(self: ObjectStore, *given: Any) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise StoreUnavailable("cut off")
        put(self, *given)

    monkeypatch.setattr(ObjectStore, "put", fail_soon)
    with pytest.raises(StoreUnavailable):
        run.copy()
    assert [read_copy(run.store, name).version for name in list_copies(run.store)] == [3]
    assert fetch_run(run.url, run.folder / "a")[1].version == 3
    assert not (run.run_dir / STAGING).exists()
    monkeypatch.setattr(ObjectStore, "put", put)
    put_names: list[str] = []
    monkeypatch.setattr(
        ObjectStore, "put", lambda self, name, *given: (put_names.append(name), put(self, name, *given))
    )
    made = run.copy()
    assert made is not None and made.version == 6
    assert len(put_names) == len(set(put_names)) and 0 < len(put_names) < len(made.files) - 4


def test_old_copies_go_with_what_they_alone_need_and_what_is_shared_stays(run: MirroredRun) -> None:
    for version in (3, 6, 9, 12):
        run.checkpoint(version)
        run.copy()
    copies = [read_copy(run.store, name) for name in list_copies(run.store)]
    assert [copy.version for copy in copies] == [9, 12]
    needed = {file.digest.rpartition(":")[2] for copy in copies for file in copy.files.values()}
    assert {name.rpartition("/")[2] for name in run.store.names("files")} == needed
    assert fetch_run(run.url, run.folder / "a", version=9)[1].version == 9
    with pytest.raises(ConfigError, match="no copy of version 3, only of 9, 12"):
        fetch_run(run.url, run.folder / "b", version=3)


def test_the_last_copy_of_a_run_takes_the_place_of_that_of_the_same_checkpoint(run: MirroredRun) -> None:
    for version in (3, 6):
        run.checkpoint(version)
        run.copy()
    assert run.copy() == read_copy(run.store, list_copies(run.store)[-1]), "nothing new: nothing is written"
    (run.run_dir / "report.html").write_text("the end")
    made = run.copy(is_last=True)
    assert made is not None and "report.html" in made.files
    assert [read_copy(run.store, name).version for name in list_copies(run.store)] == [3, 6]


def test_a_damaged_copy_is_passed_over_and_with_none_whole_nothing_is_left_behind(run: MirroredRun) -> None:
    run.checkpoint(3)
    first = run.copy()
    run.checkpoint(6)
    second = run.copy()
    assert first is not None and second is not None
    run.break_content(second.files["checkpoints/000002.version-6/model/weights"].digest, lambda b: b[:-1] + b"!")
    told: list[str] = []
    folder, copy = fetch_run(run.url, run.folder / "a", tell=told.append)
    assert copy.version == 3 and latest_checkpoint(folder / "checkpoints") is not None
    assert any("000002.version-6/model/weights" in line and "do not match its digest" in line for line in told)
    run.break_content(first.files["checkpoints/000001.version-3/model/weights"].digest, lambda b: b[:-1])
    with pytest.raises(DataError, match=r"none of the 2 copies at .* is intact"):
        fetch_run(run.url, run.folder / "b")
    assert list((run.folder / "b").iterdir()) == []


def test_a_checkpoint_that_is_damaged_here_is_not_copied(run: MirroredRun) -> None:
    path = run.checkpoint(3)
    (path / "model" / "weights").write_text("?" * 1000)
    with pytest.raises(DataError, match=r"model/weights has digest .*it is damaged here"):
        run.copy()
    assert list_copies(run.store) == []


def test_a_checkpoint_that_the_run_removes_meanwhile_is_copied_whole(
    run: MirroredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.checkpoint(3)
    put = ObjectStore.put

    def remove_first(self: ObjectStore, *given: Any) -> None:
        shutil.rmtree(path, ignore_errors=True)
        put(self, *given)

    monkeypatch.setattr(ObjectStore, "put", remove_first)
    run.copy()
    found = latest_checkpoint(fetch_run(run.url, run.folder / "a")[0] / "checkpoints")
    assert found is not None and found.version == 3


def test_a_supervisor_whose_mirror_was_taken_over_writes_nothing_more_there(run: MirroredRun) -> None:
    run.checkpoint(3)
    run.copy()
    run.copy(owner="b", takes_over=True)
    run.checkpoint(6)
    before = run.store.names("")
    with pytest.raises(Fenced, match=r"another supervisor, on .*makes no more copies"):
        run.copy(owner="c")
    assert run.store.names("") == before


@pytest.mark.parametrize("path", ["../out", "/etc/out", "checkpoints/../../out", "keys/host.secret", "ledger.json", ""])
def test_a_manifest_cannot_lead_out_of_the_folder_or_to_a_secrets_place(run: MirroredRun, path: str) -> None:
    run.checkpoint(3)
    made = run.copy()
    assert made is not None
    [name] = list_copies(run.store)
    evil = msgspec.structs.replace(made, files={**made.files, path: made.files["history.jsonl"]})
    run.store.put_bytes(name, msgspec.json.encode(evil))
    told: list[str] = []
    with pytest.raises(DataError, match="none of the 1 copies"):
        fetch_run(run.url, run.folder / "a", tell=told.append)
    assert len(told) == 1 and "is not a file that copies contain" in told[0]


def test_a_fetch_that_cannot_be_is_told_before_anything_is_moved(
    run: MirroredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="holds no complete copy of a run"):
        fetch_run(run.url, run.folder / "a")
    run.checkpoint(3)
    run.copy()
    with pytest.raises(ConfigError, match=r"exists already; .*headrace up --resume .*--set run\.dir"):
        fetch_run(run.url, run.run_dir.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(10 << 20))  # noqa: PYI024
    with pytest.raises(StorageFailed, match=r"10 MB free, and .* takes .*make room"):
        fetch_run(run.url, run.folder / "a")


def test_an_embedded_ledger_is_copied_while_it_grows_with_all_that_came_before(run: MirroredRun) -> None:
    shutil.rmtree(run.run_dir / "ledger")
    run.checkpoint(3)
    server = EmbeddedServer(run.run_dir, max_memory_mb=64)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set("before", "checkpoint")
            client.bgrewriteaof()
            for number in range(2000):
                client.set(f"key:{number}", number)
            run.copy()
            client.set("after", "copy")
    finally:
        server.stop()
    folder, _ = fetch_run(run.url, run.folder / "a")
    again = EmbeddedServer(folder, max_memory_mb=64)
    again.start()
    try:
        with redis.Redis.from_url(again.url) as client:
            assert client.get("before") == b"checkpoint"
            assert client.get("key:1999") == b"1999"
            assert client.get("after") is None
    finally:
        again.stop()


def test_a_ledger_that_others_serve_is_named_so_that_no_resume_has_an_empty_one(
    run: MirroredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.checkpoint(3)
    write_address(run.run_dir, LedgerAddress(url="redis://:password-of-a-test@10.0.0.9:6379/0"))
    run.copy()
    folder, copy = fetch_run(run.url, run.folder / "a")
    assert not any(path.startswith("ledger") for path in copy.files)
    config = read_resolved(folder)
    with pytest.raises(ConfigError, match="Give the whole URL again"):
        known_url(folder, config.ledger.url)
    assert b"password-of-a-test" not in b"".join(contents(run.bucket).values())


def test_a_disk_that_cannot_hold_the_copys_files_is_told(run: MirroredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.checkpoint(3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "_copy", full)
    with pytest.raises(StorageFailed, match=r"cannot hold a copy of the run: .*No space left"):
        run.copy()
    assert list_copies(run.store) == []
