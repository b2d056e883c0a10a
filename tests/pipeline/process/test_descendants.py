"""The claims of pipeline.process.descendants that a run's end does not show each time."""

from __future__ import annotations

import secrets
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.process import descendants
from pipeline.process.descendants import SANDBOX_MARK, end_marked


class Proc:
    """A stand-in for ``/proc`` with one process, in the state that the kernel shows."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder = folder / str(pid)
        self._folder.mkdir()

    def show(self, environment: str, *, state: str = "R", flags: int = 0, env_end: int) -> None:
        fields = ["0"] * 48
        fields[5], fields[47] = str(flags), str(env_end)
        (self._folder / "stat").write_text(f"1 (a name) of) {state} {' '.join(fields)}\n")
        (self._folder / "environ").write_text(environment)


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(8)


def test_a_process_in_the_middle_of_exec_is_ended_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        proc = Proc(tmp_path, process.pid)
        proc.show("", env_end=0)
        monkeypatch.setattr(descendants, "_PROC", tmp_path)

        entries = f"PATH=/bin\0{SANDBOX_MARK}={mark}\0"
        monkeypatch.setattr(descendants.time, "sleep", lambda _: proc.show(entries, state="S", env_end=9))
        try:
            number = end_marked(SANDBOX_MARK, mark)
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()
    assert number == 1


@pytest.mark.parametrize(
    ("state", "flags", "env_end"),
    [
        pytest.param("Z", 0, 0, id="has ended"),
        pytest.param("S", descendants._KERNEL_THREAD, 0, id="is the kernel's"),
        pytest.param("S", 0, 4096, id="was started without one"),
    ],
)
def test_no_search_waits_for_a_process_that_never_has_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, state: str, flags: int, env_end: int
) -> None:
    Proc(tmp_path, 4_000_000).show("", state=state, flags=flags, env_end=env_end)
    monkeypatch.setattr(descendants, "_PROC", tmp_path)
    monkeypatch.setattr(descendants.time, "sleep", lambda _: pytest.fail("waited"))
    assert end_marked(SANDBOX_MARK, mark) == 0


def test_the_kernel_shows_a_process_after_exec_as_such() -> None:
    with subprocess.Popen(["sleep", "600"], env={}) as process:
        try:
            while Path(f"/proc/{process.pid}/cmdline").read_bytes() != b"sleep\x00600\x00":
                pass
            assert not descendants._executes(process.pid)
        finally:
            process.kill()
