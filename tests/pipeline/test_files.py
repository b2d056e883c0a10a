"""Claims about data that other users must not read: files, and the memory of a crashed process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

SHOW = "import os, resource; open('made', 'w').close(); os.mkdir('folder'); print(*resource.getrlimit(resource.RLIMIT_CORE))"
BEGIN = f"""
import subprocess, sys
from pipeline.files import keep_private
keep_private()
subprocess.run([sys.executable, "-c", {SHOW!r}], check=True)
"""


def run(text: str, folder: Path) -> str:
    before = os.umask(0o022)
    try:
        command = [sys.executable, "-c", text]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout
    finally:
        os.umask(before)


def test_a_process_and_its_children_write_for_their_owner_alone_and_leave_no_core(tmp_path: Path) -> None:
    soft, hard = map(int, run(BEGIN, tmp_path).split())
    assert soft == 0
    assert hard == resource.getrlimit(resource.RLIMIT_CORE)[1], "who must have a core file may still ask for one"
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_every_command_begins_so(tmp_path: Path) -> None:
    text = f"""
import subprocess, sys
import pipeline.cli
sys.argv = ["headrace", "--version"]
try: pipeline.cli.main()
except SystemExit: pass
subprocess.run([sys.executable, "-c", {SHOW!r}], check=True)
"""
    assert run(text, tmp_path).splitlines()[-1].startswith("0 ")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600
