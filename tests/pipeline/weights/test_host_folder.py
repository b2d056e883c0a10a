"""Claims about the one copy of a version on a host."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from pipeline.weights.host_folder import HostFolder
from pipeline.weights.store import fetched_folder

LEADS = """
import sys, time
from pathlib import Path
from pipeline.weights.host_folder import HostFolder
folder = HostFolder(Path(sys.argv[1]), shared_memory=False)
assert folder.lead()
segment = folder.take(3, 1 << 16)
segment.data[:] = 7
print("half", flush=True)
time.sleep(60)
"""


def folder_of(tmp_path: Path) -> Path:
    return fetched_folder(tmp_path, shared_memory=False)


def test_one_worker_of_a_host_leads_until_it_leaves_and_then_another(tmp_path: Path) -> None:
    first, second = (HostFolder(tmp_path, shared_memory=False) for _ in range(2))
    assert first.lead() and first.lead()
    assert not second.lead()
    segment = first.take(3, 1 << 16)
    assert not any(path.exists() for path in second.named(3)), "it is not named before it is verified"
    kept = first.keep(segment, 3)
    assert kept in second.named(3)
    first.close()
    assert kept.exists(), "another worker of the host uses it"
    assert second.lead()
    second.close()
    assert not folder_of(tmp_path).exists(), "the last worker of the host removes the folder"


def test_a_leader_that_is_killed_is_replaced_and_its_half_file_goes(tmp_path: Path) -> None:
    other = HostFolder(tmp_path, shared_memory=False)
    leader = subprocess.Popen([sys.executable, "-c", LEADS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    with leader:
        assert leader.stdout.readline() == "half\n"
        assert not other.lead()
        assert len(list(folder_of(tmp_path).rglob("*.partial"))) == 1
        leader.send_signal(signal.SIGKILL)
        leader.wait()
    assert other.lead()
    segment = other.take(3, 1 << 16)
    assert list(folder_of(tmp_path).rglob("*.partial")) == [segment.path]
    other.close()


def test_a_worker_that_joins_while_the_last_one_leaves_gets_a_folder_that_stays(tmp_path: Path) -> None:
    before = HostFolder(tmp_path, shared_memory=False)
    before.close()
    after = HostFolder(tmp_path, shared_memory=False)
    assert folder_of(tmp_path).exists() and after.lead()
    after.close()
