"""Claims about files that grow while others write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.files import MAX_BYTES, cut
from pipeline.fleet.status import RunSnapshot
from tests.pipeline.supervisor.supervised import Run


def test_a_long_file_keeps_its_last_whole_lines_and_says_what_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("".join(f"line {number}\n" for number in range(10_000)))
    size = path.stat().st_size
    assert cut(path, max_bytes=1000, kept_bytes=200)
    first, *kept = path.read_text().splitlines()
    assert kept == [f"line {number}" for number in range(10_000 - len(kept), 10_000)]
    assert 180 <= len("\n".join(kept)) <= 200
    assert first == f"[the first {size - len(chr(10).join(kept)) - 1} bytes were cut off here: at most 1000 are kept]"
    assert not cut(path, max_bytes=1000, kept_bytes=200), "it is short now"


def test_a_short_file_a_missing_one_and_a_link_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x\n" * 1000)
    (tmp_path / "link").symlink_to(tmp_path / "long")
    assert not cut(tmp_path / "long", max_bytes=2000, kept_bytes=10)
    assert not cut(tmp_path / "none", max_bytes=10, kept_bytes=10)
    with pytest.raises(OSError, match="link"):
        cut(tmp_path / "link", max_bytes=10, kept_bytes=10)
    assert (tmp_path / "long").stat().st_size == 2000


def test_a_process_that_appends_goes_on_at_the_new_end(tmp_path: Path) -> None:
    path = tmp_path / "out"
    writer = "import sys\nfor line in sys.stdin: print('x' * 999, flush=True); print(line, end='', flush=True)"
    with path.open("ab") as output:
        command = [sys.executable, "-c", writer]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True)
    assert process.stdin is not None
    for _ in range(20):
        process.stdin.write("before\n")
    process.stdin.flush()
    while path.stat().st_size < 20 * 1007:
        pass
    assert cut(path, max_bytes=5000, kept_bytes=2100)
    process.communicate("after\n", timeout=30)
    text = path.read_bytes()
    assert b"\0" not in text, "no hole where the old end was"
    assert text.endswith(b"before\n" + b"x" * 999 + b"\nafter\n")
    assert len(text) < 4000


@pytest.mark.timeout(90)
def test_what_workers_print_and_the_servers_log_are_bounded_while_a_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    long = [run.run_dir / "logs" / "generator-0.out", run.run_dir / "ledger" / "server.log"]
    num_looks = 0

    def react(snapshot: RunSnapshot) -> None:
        nonlocal num_looks
        if not num_looks:
            for path in long:
                with path.open("ab") as file:
                    file.write(b"chatter\n" * (MAX_BYTES // 8 + 1))
        num_looks += 1
        if num_looks == 6:
            assert all(path.stat().st_size < MAX_BYTES / 4 for path in long)
            run.interrupt(snapshot)

    run.when_live(lambda _: setattr(run, "react", react))
    assert run.until_end().exit_code == 0
    assert all(b"were cut off here" in path.read_bytes()[:200] for path in long)
