"""Claims about the facts of this very host, and about what cannot be read."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from pipeline.preflight import host
from pipeline.preflight.ask import CheckReport
from pipeline.preflight.host import (
    Disk,
    TorchBuild,
    clock_difference_s,
    disk_of,
    driver,
    free_ports,
    probe_torch,
    tasks,
)


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    found = probe_torch()
    assert isinstance(found, TorchBuild), found
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)
    assert found.threads >= 1


def test_a_torch_that_hangs_or_fails_is_a_reason_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    assert "has not answered within 0.01 s" in str(probe_torch(timeout_s=0.01))
    assert time.monotonic() - begun < 5.0
    monkeypatch.setattr(host, "run", lambda *_, **__: CheckReport("a\nImportError: no torch", ""))
    assert probe_torch() == "ImportError: no torch"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", (550, 54, 15)),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", (580, 95, 5)),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82  Wed\n", (470, 82, 0)),
        ("nothing of use\n", None),
    ],
)
def test_the_driver_is_read_from_the_kernel(tmp_path: Path, text: str, version: tuple[int, ...] | None) -> None:
    (tmp_path / "version").write_text(text)
    assert driver(tmp_path / "version") == version
    assert driver(tmp_path / "absent") is None


def test_a_containers_limit_of_processes_is_seen(tmp_path: Path) -> None:
    (tmp_path / "pids.max").write_text("100\n")
    (tmp_path / "pids.current").write_text("42\n")
    assert tasks(tmp_path) == (100, 42)
    (tmp_path / "pids.max").write_text("max\n")
    assert tasks(tmp_path)[0] != 100


def test_free_ports_are_counted_by_listening_on_them() -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        second.bind(("127.0.0.1", 0))
        port = second.getsockname()[1]
        second.close()
        taken = first.getsockname()[1]
        assert free_ports("127.0.0.1", [taken], 1) == 0
        assert free_ports("127.0.0.1", [taken, port], 5) == 1
        assert free_ports("127.0.0.1", [port, taken], 1) == 1


def test_an_embedded_ledger_has_no_clock_of_its_own_and_a_server_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_server: str
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert clock_difference_s(None) is None
    difference = clock_difference_s(redis_server)
    assert isinstance(difference, float) and abs(difference) < 1.0
    absent = clock_difference_s(f"unix://{tmp_path}/no.sock")
    assert isinstance(absent, str) and absent


def test_a_folder_that_is_to_be_made_has_the_disk_of_the_one_above(tmp_path: Path) -> None:
    found = disk_of(tmp_path / "runs" / "demo")
    assert isinstance(found, Disk)
    assert (found.folder, found.is_writable) == (tmp_path, True)
    assert found.free_bytes > 0


def test_a_mute_file_system_is_a_reason_and_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered, real = threading.Event(), shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: real(folder) if answered.wait(30.0) else None)
    assert "gave no answer within 0.01 s" in str(disk_of(tmp_path, timeout_s=0.01))
    answered.set()


def test_the_host_itself_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "probe_torch", lambda: "not asked here")
    found = host.probe_host()
    assert found.python == sys.version_info[:3]
    assert found.machine.num_cores >= 1
    assert 0 < found.room.free <= found.room.memory
    assert "valkey-server" in found.server or "redis-server" in found.server
    assert found.open_files[0] != 0
