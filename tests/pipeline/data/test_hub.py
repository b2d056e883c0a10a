"""Claims about data sets on the hub, by the real client against a hub on loopback.

Claims about the progress of fetches from the hub.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.data import hub
from pipeline.data.hub import fetching, parse_hub_name, uploading
from pipeline.process.progress_bar import ProgressBar
from protocol.errors import DataError
from tests.driven_progress import DrivenProgress

COMMIT = "5b1" + 37 * "0"
TOKEN = "hf_of_a_test"
ROW = b'{"question": "1+2=", "answer": "#### 3"}\n'
FILES = {"main/train-0.jsonl": ROW, "main/train-1.jsonl": ROW, "main/test-0.jsonl": ROW, "README.md": b"# sums\n"}
PLAIN, PRIVATE, GATED = "acme/sums", "acme/private", "acme/gated"

SCRIPT = """
import json, sys
from pathlib import Path
from pipeline.config.load import load_config
from pipeline.data.places import local_file, pin_data
from protocol.errors import DataError
for name in sys.argv[1:]:
    run = Path("run.toml")
    run.write_text(f'model.path = "x"\\ndata.train = ["{name}"]')
    try:
        train = pin_data(load_config([run])).data.train
        print(json.dumps({"train": [str(one) for one in train], "texts": [local_file(one).read_text() for one in train]}))
    except DataError as error:
        print(json.dumps({"error": str(error)}))
"""


class Hub(BaseHTTPRequestHandler):
    """The few paths of the hub's interface that a download takes."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        repository = next((name for name in (PLAIN, PRIVATE, GATED) if f"/{name}/" in path + "/"), None)
        if repository is None or (repository == PRIVATE and self.headers["Authorization"] != f"Bearer {TOKEN}"):
            return self.reply(404 if repository is None else 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repository == GATED:
            return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        rest = path.split(f"/{repository}", 1)[1]
        if rest in ("/revision/main", "", f"/revision/{COMMIT}"):
            return self.reply(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": []}).encode(), {})
        if rest.startswith("/revision/"):
            return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if rest.startswith("/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(held), "oid": 40 * "a"} for name, held in FILES.items()
            ]
            return self.reply(200, json.dumps(entries).encode(), {})
        held = FILES.get(rest.removeprefix(f"/resolve/{COMMIT}/"))
        if held is None:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return self.reply(200, held, {"ETag": f'"{rest[-8:-6]}{len(held)}"', "X-Repo-Commit": COMMIT})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_on_hub(script: str, folder: Path, hub: str, *words: str, **more: str) -> list[dict[str, Any]]:
    """Run a script with a hub; return what it prints, a JSON object a line.

    It has a process of its own, for the client reads its settings at import."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def pinned(folder: Path, hub: str, *names: str, **more: str) -> list[dict[str, Any]]:
    """Pin and fetch each name."""
    return run_on_hub(SCRIPT, folder, hub, *names, **more)


def test_a_pattern_on_the_hub_becomes_its_files_with_their_commit(tmp_path: Path, endpoint: str) -> None:
    (found,) = pinned(tmp_path, endpoint, f"hf://datasets/{PLAIN}/main/train-*.jsonl")
    assert found["train"] == [f"hf://datasets/{PLAIN}@{COMMIT}/main/train-{n}.jsonl" for n in (0, 1)]
    assert found["texts"] == [ROW.decode()] * 2


def test_a_pinned_file_and_a_pattern_come_from_the_cache_without_a_network(tmp_path: Path, endpoint: str) -> None:
    names = [f"hf://datasets/{PLAIN}/main/train-*.jsonl", f"hf://datasets/{PLAIN}@{COMMIT}/main/train-0.jsonl"]
    first = pinned(tmp_path, endpoint, *names)
    assert pinned(tmp_path, endpoint, *names, HF_HUB_OFFLINE="1") == first
    assert pinned(tmp_path, "http://127.0.0.1:9", *names) == first


def test_a_name_that_cannot_be_had_is_refused_with_the_remedy(tmp_path: Path, endpoint: str) -> None:
    cases = {
        "hf://datasets/acme/none/x.jsonl": "has no data set acme/none, or it is private; correct the name, or set HF_TOKEN",
        f"hf://datasets/{PRIVATE}/main/train-0.jsonl": "or it is private",
        f"hf://datasets/{GATED}/main/train-0.jsonl": "access must be requested from its owners; accept their terms at",
        f"hf://datasets/{PLAIN}@v9/main/train-0.jsonl": "acme/sums has no such revision; name a branch",
        f"hf://datasets/{PLAIN}/train.parquet": "matches no file; the data set has main/test-0.jsonl",
        f"hf://datasets/{PLAIN}": "names no file; the data set has main/test-0.jsonl, main/train-0.jsonl",
        f"hf://datasets/{PLAIN}@{COMMIT}/other.jsonl": "no such file in this revision",
    }
    for (name, words), found in zip(cases.items(), pinned(tmp_path, endpoint, *cases), strict=True):
        assert words in found.get("error", ""), (name, found)
    (found,) = pinned(tmp_path, endpoint, f"hf://datasets/{PRIVATE}/main/train-0.jsonl", HF_TOKEN=TOKEN)
    assert found["texts"] == [ROW.decode()]


def test_a_network_that_refuses_is_named_with_the_cache_and_the_remedy(tmp_path: Path) -> None:
    name = f"hf://datasets/{PLAIN}/main/train-*.jsonl"
    for settings in ({}, {"HF_HUB_OFFLINE": "1"}):
        (found,) = pinned(tmp_path, "http://127.0.0.1:9", name, **settings)
        assert "http://127.0.0.1:9 cannot be reached, and the cache" in found["error"]
        assert "hf download --repo-type dataset acme/sums" in found["error"]


@pytest.mark.parametrize("name", ["hf://datasets/", "hf://datasets/one", "hf://datasets//x/y.jsonl"])
def test_what_is_no_name_on_the_hub_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="OWNER/NAME"):
        parse_hub_name(name)


def test_the_hubs_parquet_conversion_has_its_own_revision() -> None:
    source = parse_hub_name("hf://datasets/acme/sums@~parquet/main/0.parquet")
    assert source.revision == "refs/convert/parquet"
    assert parse_hub_name(str(source)) == source


def test_bars_of_bytes_count_and_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, made = io.StringIO(), list[ProgressBar]()
    counting = hub._counting

    def seen(bar: ProgressBar) -> type:
        made.append(bar)
        return counting(bar)

    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(hub, "_counting", seen)
    with fetching("hf://a/b@main") as bars:
        # as the package makes them: the size becomes known file by file
        of_bytes = bars(total=0, initial=0, unit="B", unit_scale=True, name="huggingface_hub.snapshot_download")
        of_bytes.total = 8_000_000
        of_bytes.update(2_000_000)
        assert list(bars(["a file"], desc="Fetching 1 files", total=1)) == ["a file"]
        assert made[0].in_words().startswith("25 %, 2 of 8 MB")
    assert stream.getvalue() == ""


def test_an_upload_is_measured_within_a_file_by_the_packages_own_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, big = DrivenProgress(monkeypatch), tmp_path / "model.safetensors"
    big.write_bytes(b"x" * 8_000_000)
    from huggingface_hub.utils import tqdm, tqdm_stream_file  # pyright: ignore[reportPrivateImportUsage]

    with uploading("to me/op", 10_000_000) as upload:
        with upload.file("config.json", 2_000_000):
            pass
        with upload.file("model.safetensors", 8_000_000), tqdm_stream_file(big) as stream:
            stream.read(3_000_000)
            seen.let_pass(5.0)
    assert seen.lines == [
        "uploading to me/op: model.safetensors, 50 %, 5 of 10 MB, about 0:05 left",
        "uploading to me/op: done after 0:05",
    ]
    assert "update" not in vars(tqdm), "the package's class is as it was"


def test_an_upload_in_pieces_counts_what_is_stored_and_not_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DrivenProgress(monkeypatch)
    from huggingface_hub.utils._xet_progress_reporting import XetUploadProgressReporter

    item = SimpleNamespace(item_name="model.safetensors", bytes_completed=4_000_000, total_bytes=8_000_000)
    group = SimpleNamespace(
        total_bytes=8_000_000,
        total_bytes_completed=4_000_000,
        total_bytes_completion_rate=1e6,
        total_transfer_bytes=8_000_000,
        total_transfer_bytes_completed=1_000_000,
        total_transfer_bytes_completion_rate=1e6,
        shard=None,
    )
    with uploading("to me/op", 8_000_000) as upload, upload.file("model.safetensors", 8_000_000):
        # As the package makes it, and feeds it from its own threads.
        reporter = XetUploadProgressReporter()
        reporter.update_progress(group, {1: item})
        seen.let_pass(6.0)
        reporter.close()
    assert seen.lines[0] == "uploading to me/op: model.safetensors, 50 %, 4 of 8 MB, about 0:06 left"
    assert len(seen.lines) == 2, "the package draws nothing"
