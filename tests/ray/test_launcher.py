"""Claims about the launcher of Ray actors, on a real cluster of several nodes on loopback.

They need an environment with Ray: ``make test-ray``."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.operations import LaunchSection, RayRoleSection, RaySection, ResourcesSection
from pipeline.ledger.token import Token
from pipeline.supervisor.launchers import ray_actors
from pipeline.supervisor.launchers.commands import JoinCommand
from pipeline.supervisor.launchers.ray_actors import RayLauncher, is_open, namespace, ray_run
from pipeline.supervisor.launchers.seam import JobState, LaunchFailed
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.supervisor.launchers.contract import LauncherContract, until, until_state
from tests.pipeline.supervisor.launchers.place_tools import (
    SECRET,
    assert_no_secret_but_in_a_private_file,
    given,
    join_command,
)
from tests.ray.cluster import RayCluster, open_cluster

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]
_runs = itertools.count()


class RayPlace:
    """A run of its own in a cluster."""

    def __init__(self, cluster: RayCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.join: JoinCommand = join_command(folder, f"run-{next(_runs)}")
        self.launchers: list[RayLauncher] = []
        self.fleet: list[tuple[Role, str]] = []
        self.set()

    def set(self, *, labelled: RayRoleSection | None = None, cpus: int = 1, **changes: Any) -> None:
        """Set what generators request, and further settings of Ray."""
        place = RaySection(address=self.cluster.address, generator=labelled or RayRoleSection(), **changes)
        generator = ResourcesSection(cpus=cpus)
        self.settings = LaunchSection(on="ray", program=self.join.program, ray=place, generator=generator, poll_s=0.2)

    def launcher(self) -> RayLauncher:
        self.launchers.append(RayLauncher(self.settings, self.join, self.fleet))
        return self.launchers[-1]

    def crash(self, worker: str) -> None:
        (self.folder / f"crash-{worker}").touch()

    def lose(self, worker: str) -> None:
        os.kill(parent_of(given(self.folder, worker)["pid"]), signal.SIGKILL)

    def private_folders(self) -> list[Path]:
        """Return the folders of this run's actors."""
        return list((self.cluster.state / "headrace" / "launched" / self.join.run).glob("ray-*"))

    def close(self) -> None:
        launcher = self.launchers[-1] if self.launchers else self.launcher()
        with suppress(LaunchFailed):
            for worker in launcher.listing():
                launcher.stop(worker, now=True)
        for one in self.launchers:
            one.close()


def stat_of(pid: int) -> list[str]:
    """Return a process's state, its parent, and further fields of proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    """Return a process's parent: of a worker, the process of its actor."""
    return int(stat_of(pid)[1])


def runs(pid: int) -> bool:
    with suppress(OSError):
        return stat_of(pid)[0] != "Z"
    return False


@pytest.fixture
def place(cluster: RayCluster, tmp_path: Path) -> Iterator[RayPlace]:
    found = RayPlace(cluster, tmp_path)
    yield found
    found.close()


def begun(place: RayPlace, worker: str, other_than: int = 0) -> int:
    """Wait for a worker's stand-in; return its process id."""

    def pid() -> int:
        with suppress(OSError):
            found = given(place.folder, worker)["pid"]
            return found if found != other_than and runs(found) else 0
        return 0

    return until(pid)


def drivers() -> list[int]:
    """Return the drivers of this process's launchers."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_driver = b"launchers.ray_agent" in (process / "cmdline").read_bytes()
            if is_driver and parent_of(int(process.name)) == os.getpid():
                found.append(int(process.name))
    return found


def kill_drivers() -> None:
    """Kill the drivers of this process's launchers; return when they have ended."""
    for driver in drivers():
        os.kill(driver, signal.SIGKILL)
        until(lambda driver=driver: has_ended(driver))


def has_ended(child: int) -> bool:
    """Whether a child's last thread has ended: the first may be a zombie while others still end."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def freeze(pid: int) -> None:
    """Stop a process; return when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stat_of(pid)[0] == "T")


def unread_input(pid: int) -> int:
    """Return how many bytes wait in the pipe that is a process's standard input."""
    with Path(f"/proc/{pid}/fd/0").open("rb", buffering=0) as pipe:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


class TestRay(LauncherContract):
    """The contract, by actors."""


def test_a_later_supervisor_finds_running_and_waiting_workers(place: RayPlace) -> None:
    place.set(cpus=3)
    first = place.launcher()
    for number in range(4):
        first.start(Role.GENERATOR, f"generator-{number}")
    pids = [begun(place, f"generator-{number}") for number in range(3)]
    assert first.listing()["generator-3"].state is JobState.WAITING
    first.close()
    later = place.launcher()
    states = {worker: job.state for worker, job in later.listing().items()}
    running, waiting = JobState.RUNNING, JobState.WAITING
    assert states == {**{f"generator-{number}": running for number in range(3)}, "generator-3": waiting}
    later.stop("generator-0")
    until(lambda: later.listing()["generator-3"].state is running)
    assert begun(place, "generator-3") and runs(pids[1])
    assert "drained generator-0" in later.logs("generator-0")


def test_the_worker_of_a_lost_actor_begins_again_by_the_supervisors_order_alone(place: RayPlace) -> None:
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until_state(launcher, "generator-0", JobState.RUNNING)
    first = begun(place, "generator-0")
    place.lose("generator-0")
    job = until_state(launcher, "generator-0", JobState.ENDED)
    assert job.exit_code is None and "lost" in job.reason
    # nor does a later supervisor's look begin it
    again = place.launcher()
    assert [again.listing() for _ in range(3)] == [{}] * 3
    assert given(place.folder, "generator-0")["pid"] == first
    launcher.start(Role.GENERATOR, "generator-0")
    begun(place, "generator-0", other_than=first)
    assert until_state(launcher, "generator-0", JobState.RUNNING)


def test_a_worker_is_lost_with_its_actor_and_drains_before_its_first_report_too(place: RayPlace) -> None:
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    begun(place, "generator-0")
    place.lose("generator-0")
    assert "lost" in until_state(launcher, "generator-0", JobState.ENDED).reason
    launcher.start(Role.GENERATOR, "generator-1")
    begun(place, "generator-1")
    launcher.stop("generator-1")
    assert until_state(launcher, "generator-1", JobState.ENDED).exit_code == 0


def test_the_workers_of_a_lost_node_begin_again_on_another(place: RayPlace) -> None:
    place.set(cpus=5)
    node = place.cluster.add_node(num_cpus=5)
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    before = until_state(launcher, "generator-0", JobState.RUNNING).place
    first = begun(place, "generator-0")
    place.cluster.kill_node(node)
    assert until_state(launcher, "generator-0", JobState.ENDED).exit_code is None
    until(lambda: not runs(first))
    launcher.start(Role.GENERATOR, "generator-0")
    waiting = until_state(launcher, "generator-0", JobState.WAITING)
    assert waiting.reason == "it needs CPU 5, and no node has more than CPU 4; Ray's autoscaler may add one"
    node = place.cluster.add_node(num_cpus=5)
    assert until_state(launcher, "generator-0", JobState.RUNNING).place != before
    begun(place, "generator-0", other_than=first)
    place.cluster.kill_node(node)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (RayRoleSection(labels={"place": "three"}), "none of 3 nodes has the labels place=three"),
        (RayRoleSection(resources={"fast_disk": 1}), "it needs fast_disk 1, and no node has more than fast_disk 0"),
    ],
    ids=["label", "resource"],
)
def test_a_worker_waits_in_words_until_a_node_that_it_may_use_is_there(
    place: RayPlace, wanted: RayRoleSection, told: str
) -> None:
    place.set(labelled=wanted)
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    # It came later, may be anywhere, and begins first.
    launcher.start(Role.REWARD, "reward-0")
    until_state(launcher, "reward-0", JobState.RUNNING)
    job = launcher.listing()["generator-0"]
    assert (job.state, job.reason) == (JobState.WAITING, f"{told}; Ray's autoscaler may add one")
    node = place.cluster.add_node(labels={"place": "three"}, resources={"fast_disk": 1})
    until_state(launcher, "generator-0", JobState.RUNNING)
    launcher.stop("generator-0", now=True)
    place.cluster.kill_node(node)


def test_a_worker_ends_with_its_actor_and_so_does_all_that_it_started(place: RayPlace) -> None:
    script = (
        "import subprocess, sys, time, pathlib;"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True);"
        "pathlib.Path(sys.argv[1], 'child').write_text(str(child.pid)); time.sleep(300)"
    )
    place.join = replace(place.join, program=(sys.executable, "-c", script, str(place.folder)))
    place.set()
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until_state(launcher, "generator-0", JobState.RUNNING)
    child = int(until(lambda: (place.folder / "child").exists() and (place.folder / "child").read_text()))
    (private,) = place.private_folders()
    launcher.stop("generator-0", now=True)
    until(lambda: not runs(child))
    until(lambda: not private.exists())


def test_a_secret_is_in_a_private_file_and_in_nothing_that_ray_shows(
    place: RayPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:ledger-password@127.0.0.1:1/0")
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    begun(place, "generator-0")
    until_state(launcher, "generator-0", JobState.RUNNING)
    assert_no_secret_but_in_a_private_file(place.folder, "generator-0")
    environment = given(place.folder, "generator-0")["environment"]
    assert not [name for name in environment if name.startswith("RAY_")], "the cluster's own token is one of them"
    (private,) = place.private_folders()
    holding = [path.name for path in private.iterdir() if SECRET in path.read_text(errors="replace")]
    assert holding == ["token"] and private.stat().st_mode & 0o77 == 0
    accessor = place.cluster.accessor
    shown = [*accessor.get_actor_table(None, None), *accessor.get_task_events(), *accessor.get_worker_table()]
    assert any(b"generator-0" in row for row in shown), "the tables that a state API shows"
    logs = [path.read_bytes() for path in place.cluster.session.rglob("*") if path.is_file()]
    assert not [row for row in (*shown, *logs) if SECRET.encode() in row]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            assert SECRET.encode() not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()


def test_a_rotated_token_reaches_a_running_worker(place: RayPlace) -> None:
    secret, run = [SECRET], place.join.run
    place.join = replace(
        place.join, token_of=lambda role: Token(run=run, role=Role(role), id=f"{role}-1", secret=secret[-1])
    )
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    first = begun(place, "generator-0")
    until_state(launcher, "generator-0", JobState.RUNNING)
    (private,) = place.private_folders()
    rotated = SECRET.replace("secret", "newer")
    secret.append(rotated)
    until(lambda: launcher.listing() and rotated in (private / "token").read_text())
    assert given(place.folder, "generator-0")["pid"] == first and runs(first)


def test_a_placement_group_places_the_configured_fleet_together_and_goes_with_it(place: RayPlace) -> None:
    place.fleet = [(Role.GENERATOR, "generator-0"), (Role.GENERATOR, "generator-1")]
    place.set(cpus=2, strategy="STRICT_SPREAD")
    launcher = place.launcher()
    for number in range(3):
        launcher.start(Role.GENERATOR, f"generator-{number}")
    where = [until_state(launcher, f"generator-{number}", JobState.RUNNING).place for number in range(2)]
    assert where[0] != where[1]
    assert place.cluster.groups(namespace(place.join)) == ["CREATED", "CREATED"]
    for number in range(3):
        launcher.stop(f"generator-{number}", now=True)
    until(lambda: launcher.listing() == {} and place.cluster.groups(namespace(place.join)) == ["REMOVED", "REMOVED"])


def test_an_actor_that_no_supervisor_looks_at_frees_its_place(place: RayPlace) -> None:
    place.set(unwatched_s=4.0)
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    begun(place, "generator-0")
    until_state(launcher, "generator-0", JobState.RUNNING)
    kill_drivers()
    actor = parent_of(given(place.folder, "generator-0")["pid"])
    place.crash("generator-0")
    until(lambda: not runs(actor))


def test_a_driver_that_was_killed_is_replaced_and_no_worker_is_lost(place: RayPlace) -> None:
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    first = begun(place, "generator-0")
    (driver,) = drivers()
    freeze(driver)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(launcher.stop, "generator-7")
        until(lambda: unread_input(driver))
        os.kill(driver, signal.SIGKILL)
        with pytest.raises(LaunchFailed, match="Ray's driver has ended with code -9"):
            asked.result()
    assert until_state(launcher, "generator-0", JobState.RUNNING)
    # A driver that ends between two questions fails none.
    kill_drivers()
    launcher.stop("generator-7")
    assert until_state(launcher, "generator-0", JobState.RUNNING)
    assert given(place.folder, "generator-0")["pid"] == first and runs(first)


def test_a_cluster_that_takes_in_strangers_is_refused_and_one_with_tokens_is_not(
    place: RayPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.launcher().reach()
    assert not is_open(ray_run(place.settings, place.join))
    with open_cluster(tmp_path) as address:
        monkeypatch.delenv("RAY_AUTH_MODE")
        settings = place.settings.model_copy(update={"ray": RaySection(address=address)})
        assert is_open(ray_run(settings, place.join))
        stranger = RayLauncher(settings, place.join)
        stranger.reach()
        # as if its nodes were those of several hosts
        monkeypatch.setattr(ray_actors, "_is_loopback", lambda address: False)
        with pytest.raises(ConfigError, match=r"accepts any program .* RAY_AUTH_MODE=token"):
            stranger.reach()
        stranger.close()


def test_a_cluster_that_wants_a_token_is_named_with_where_to_put_it(
    place: RayPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match=r"the cluster requires its token; set RAY_AUTH_MODE=token"):
        place.launcher().reach()
    monkeypatch.undo()


def test_a_cluster_that_is_not_there_is_named_with_what_to_do(place: RayPlace) -> None:
    place.settings = place.settings.model_copy(update={"ray": RaySection(address="127.0.0.1:1"), "answer_s": 4.0})
    with pytest.raises(ConfigError, match=r"the Ray cluster 127\.0\.0\.1:1 cannot be used: .*`ray start`"):
        place.launcher().reach()
