"""Claims about the launcher of hosts: the contract, on a stand-in for the ssh client.

Its hosts are folders. ``tests/places`` has the same with a real ssh client and server."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from pipeline.config.operations import LaunchSection, SshSection
from pipeline.runtime.liveness import REPLACED_AFTER_S
from pipeline.supervisor.launchers import host_jobs
from pipeline.supervisor.launchers.host_jobs import HostRequest, answer
from pipeline.supervisor.launchers.hosts import SshLauncher
from pipeline.supervisor.launchers.seam import JobState, LaunchFailed
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.supervisor.launchers import place_stand_in, ssh_stand_in
from tests.pipeline.supervisor.launchers.contract import FarLauncherContract, until, until_state
from tests.pipeline.supervisor.launchers.place_tools import (
    SECRET,
    assert_no_secret_but_in_a_private_file,
    given,
    join_command,
    put_on_path,
)

HOSTS = ("one", "two")


class SshPlace:
    """Two hosts."""

    programs = ("ssh",)

    def __init__(self, folder: Path) -> None:
        self.folder, self.hosts = folder, folder / "hosts"
        for host in HOSTS:
            (self.hosts / host).mkdir(parents=True)
        program = (sys.executable, place_stand_in.__file__, str(folder))
        self.settings = LaunchSection(on="ssh", program=program, ssh=SshSection(hosts=HOSTS))
        self.now_s = 0.0

    def launcher(self) -> SshLauncher:
        return SshLauncher(self.settings, join_command(self.folder), lambda: self.now_s)

    def set_answer_s(self, limit_s: float) -> None:
        self.settings = self.settings.model_copy(update={"answer_s": limit_s})

    def jobs(self, worker: str) -> list[Path]:
        return list(self.hosts.glob(f"*/.local/state/headrace/launched/demo/{worker}.json"))

    def crash(self, worker: str) -> None:
        (self.folder / f"crash-{worker}").touch()

    def lose(self, worker: str) -> None:
        for path in self.jobs(worker):
            os.killpg(msgspec.json.decode(path.read_bytes())["identity"]["pid"], signal.SIGKILL)

    def close(self) -> None:
        for path in self.jobs("*"):
            with suppress(ProcessLookupError):
                os.killpg(msgspec.json.decode(path.read_bytes())["identity"]["pid"], signal.SIGKILL)

    def turn_off(self, host: str) -> None:
        (self.hosts / f"{host}.down").touch()

    def turn_on(self, host: str) -> None:
        (self.hosts / f"{host}.down").unlink()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshPlace]:
    found = SshPlace(tmp_path)
    put_on_path(tmp_path / "bin", {"ssh": (sys.executable, ssh_stand_in.__file__, str(found.hosts))}, monkeypatch)
    yield found
    found.close()


class TestSsh(FarLauncherContract):
    """The contract, by jobs of hosts."""


def test_workers_take_turns_on_the_hosts_and_a_later_supervisor_finds_them(place: SshPlace) -> None:
    launcher = place.launcher()
    for number in range(3):
        launcher.start(Role.GENERATOR, f"generator-{number}")
    where = {worker: job.place for worker, job in place.launcher().listing().items()}
    assert where == {"generator-0": "one", "generator-1": "two", "generator-2": "one"}


def test_a_token_reaches_its_host_by_standard_input_and_stays_in_a_private_file(
    place: SshPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:ledger-password@127.0.0.1:1/0")
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until(lambda: "begun" in launcher.logs("generator-0"))
    assert_no_secret_but_in_a_private_file(place.folder, "generator-0")
    (job,) = place.jobs("generator-0")
    for path in job.parent.iterdir():
        assert (SECRET in path.read_text(errors="replace")) == (path.name == "generator.token")
        assert path.name != "generator.token" or path.stat().st_mode & 0o77 == 0


def test_hosts_that_cannot_be_reached_are_named_with_what_ssh_said(place: SshPlace) -> None:
    launcher = place.launcher()
    launcher.reach()
    place.turn_off("two")
    with pytest.raises(ConfigError, match=r"1 of 2 hosts .* two: ssh to two failed: ssh: connect to host two port 22"):
        launcher.reach()


def test_a_host_without_headrace_is_named_with_what_its_shell_said(place: SshPlace) -> None:
    place.settings = place.settings.model_copy(update={"program": ("no-such-headrace",)})
    with pytest.raises(ConfigError, match=r"'no-such-headrace fleet place' on one failed with code 127: .*not found"):
        place.launcher().reach()


def test_a_worker_whose_host_refuses_is_started_on_another(place: SshPlace) -> None:
    launcher = place.launcher()
    place.turn_off("one")
    with pytest.raises(LaunchFailed, match="Connection refused"):
        launcher.start(Role.GENERATOR, "generator-0")
    launcher.start(Role.GENERATOR, "generator-0")
    assert launcher.listing()["generator-0"].place == "two"


def test_a_silent_host_is_lost_after_a_while_and_its_leftovers_end_when_it_is_back(place: SshPlace) -> None:
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    assert until_state(launcher, "generator-0", JobState.RUNNING).place == "one"
    until((place.folder / "given-generator-0").exists)
    place.turn_off("one")
    assert launcher.listing()["generator-0"].state is JobState.RUNNING, "a short silence loses nothing"
    place.now_s = REPLACED_AFTER_S + 1.0
    assert launcher.listing() == {}
    first = given(place.folder, "generator-0")["pid"]
    launcher.start(Role.GENERATOR, "generator-0")
    assert until_state(launcher, "generator-0", JobState.RUNNING).place == "two"
    until(lambda: given(place.folder, "generator-0")["pid"] != first)
    place.turn_on("one")
    until(lambda: len(launcher.listing()) == 1 and not runs(first))
    assert launcher.listing()["generator-0"].place == "two"
    assert runs(given(place.folder, "generator-0")["pid"])


def runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(("hosts", "told"), [((), "hosts is empty"), (("-oProxyCommand=x",), "expected HOST")])
def test_a_list_without_hosts_or_with_options_in_it_is_refused(
    place: SshPlace, hosts: tuple[str, ...], told: str
) -> None:
    settings = place.settings.model_copy(update={"ssh": SshSection(hosts=hosts)})
    with pytest.raises(ConfigError, match=told):
        SshLauncher(settings, join_command(place.folder))


def test_a_start_that_is_repeated_meanwhile_starts_one_job(place: SshPlace) -> None:
    with ThreadPoolExecutor(3) as at_once:
        list(at_once.map(lambda _: place.launcher().start(Role.GENERATOR, "generator-0"), range(3)))
    place.launcher().start(Role.GENERATOR, "generator-0")
    (record,) = place.jobs("generator-0")
    output = record.with_suffix(".out")
    until(lambda: "begun generator-0" in output.read_text())
    place.crash("generator-0")
    until(lambda: record.with_suffix(".exit").exists())
    assert output.read_text().count("begun generator-0") == 1


def test_hosts_with_one_home_folder_list_their_own_jobs_alone(place: SshPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(place.hosts / "one" / ".local" / "state"))
    place.launcher().start(Role.GENERATOR, "generator-0")
    assert list(answer(HostRequest(verb="list", run="demo")).jobs) == ["generator-0"]
    monkeypatch.setattr(host_jobs, "this_host", lambda: "another-host")
    assert answer(HostRequest(verb="list", run="demo")).jobs == {}
