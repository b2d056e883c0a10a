"""Claims about a run and a real server of the S3 protocol."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config
from pipeline.data.places import local_file, pin_data
from pipeline.files.object_store import ObjectStore
from pipeline.preflight.mirror import check_mirror
from pipeline.supervisor.mirror_runner import MirrorRunner
from pipeline.training.checkpoints import latest_checkpoint
from pipeline.training.mirror.fetching import fetch_run
from pipeline.training.mirror.layout import MirrorState, list_copies, read_record
from protocol.errors import ConfigError, DataError
from tests.away.conftest import KEY, SECRET, StoreServer
from tests.pipeline.op_config import op_config
from tests.pipeline.training.mirror.mirrored import MirroredRun, mirrored_run

# the stores' packages warn, which is not ours to mend
pytestmark = pytest.mark.filterwarnings("default")

URL = "s3://bucket/runs"


@pytest.fixture
def run(s3: StoreServer, tmp_path: Path) -> MirroredRun:
    found = mirrored_run(tmp_path, f"checkpoint.mirror={URL}")
    found.url = f"{URL}/op"
    return found


def mirroring_of(run: MirroredRun, *overrides: str) -> MirrorRunner:
    settings = ("checkpoint.mirror_every_s=0", *overrides)
    return MirrorRunner(load_config([run.run_dir / "config.toml"], settings), run.run_dir)


def number_of_calls_that_need_no_rights(s3: StoreServer, number: bytes) -> None:
    """Set it: the server then checks credentials."""
    address, plain = f"{s3.url}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(address, data=number, headers=plain, method="POST")).read()


def until(copies: MirrorRunner, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        copies.poll(time.monotonic())
        time.sleep(0.05)


async def test_a_run_is_copied_kept_to_its_number_and_fetched_with_every_digest(run: MirroredRun) -> None:
    copies = mirroring_of(run)
    for number, version in enumerate((3, 6, 9), 1):
        run.checkpoint(version)
        wanted = f"{number:06d}.version-{version}"
        until(copies, lambda: (found := read_record(run.run_dir)) and found.copied == wanted)  # noqa: B023
    assert await copies.finish(lambda: False) == ""
    assert [name.rpartition("version-")[2] for name in list_copies(run.store)] == ["6.json", "9.json"]
    folder, copy = fetch_run(run.url, run.folder / "elsewhere")
    found = latest_checkpoint(folder / "checkpoints")
    assert found is not None and found.version == copy.version == 9
    assert not any(
        secret.encode() in path.read_bytes()
        for path in [*run.run_dir.rglob("*"), *folder.rglob("*")]
        if path.is_file()
        for secret in (KEY, SECRET)
    )


def test_a_file_of_many_parts_arrives_whole_and_reports_what_moves(run: MirroredRun) -> None:
    big, size = run.folder / "big", 120 << 20
    big.write_bytes(bytes(range(256)) * (size >> 8))
    moved: list[int] = []
    run.store.put("files/big", big, moved.append)
    assert sum(moved) == size and len(moved) > 1
    run.store.get("files/big", run.folder / "again")
    assert (run.folder / "again").read_bytes() == big.read_bytes()


async def test_a_store_that_dies_is_told_and_copied_to_once_it_is_back(run: MirroredRun, s3: StoreServer) -> None:
    import s3fs  # pyright: ignore[reportMissingImports]

    run.checkpoint(3)
    s3.stop()
    copies = mirroring_of(run)
    until(copies, lambda: (found := read_record(run.run_dir)) and found.state is MirrorState.FAILED)
    failed = read_record(run.run_dir)
    assert failed is not None and "the store failed" in failed.reason
    s3.start()
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
    until(copies, lambda: (found := read_record(run.run_dir)) and found.copied == "000001.version-3")
    assert await copies.finish(lambda: False) == ""


async def test_a_server_that_accepts_and_never_answers_costs_the_run_a_sentence(
    run: MirroredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.checkpoint(3)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        copies = mirroring_of(run, "checkpoint.mirror_timeout_s=3")
        begun = time.monotonic()
        left = await copies.finish(lambda: False)
        assert time.monotonic() - begun < 20
    assert left.startswith(f"000001.version-3 was not copied to {run.url}: ")
    assert " for 3 s" in left and left.endswith("; there is no copy")


def test_a_missing_bucket_and_missing_or_wrong_credentials_are_told_before_the_start(
    run: MirroredRun, s3: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = op_config(tmp_path, f"checkpoint.mirror={URL}")
    assert check_mirror(config, is_new=True) == f"checkpoints are copied to {URL}/op"
    with pytest.raises(ConfigError, match=r"there is no such bucket .*correct the name, or create it"):
        check_mirror(op_config(tmp_path, "checkpoint.mirror=s3://nobucket/runs"), is_new=True)
    number_of_calls_that_need_no_rights(s3, b"0")
    try:
        with pytest.raises(ConfigError, match=r"refuses these credentials .*AWS_PROFILE") as refused:
            check_mirror(config, is_new=True)
        assert SECRET not in str(refused.value)
    finally:
        number_of_calls_that_need_no_rights(s3, b"1000000")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"no usable credentials were found .*AWS_PROFILE"):
        check_mirror(config, is_new=True)


def test_data_files_are_fetched_once_and_a_changed_object_is_refused(
    s3: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = ObjectStore("s3://bucket/data")
    store.put_bytes("train-0.jsonl", b'{"prompt": "1+1=", "answer": "2"}\n')
    config = pin_data(load_config([], ["model.path=x", "data.train=['s3://bucket/data/train-?.jsonl']"]))
    [entry] = config.data.train
    assert str(entry).startswith("s3://bucket/data/train-0.jsonl#sha256=")
    store.put_bytes("train-0.jsonl", b"changed\n")
    assert local_file(entry).read_bytes().startswith(b'{"prompt"'), "the cache has it"
    local_file(entry).unlink()
    with pytest.raises(DataError, match="has changed since the run began"):
        local_file(entry)
