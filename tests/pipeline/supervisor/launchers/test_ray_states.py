"""Claims about a worker on Ray by what its actor answers, without Ray: ``tests/ray`` has a real
cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from pipeline.config.operations import LaunchSection, RaySection
from pipeline.ledger.token import Token
from pipeline.supervisor.launchers.join_command import JoinCommand
from pipeline.supervisor.launchers.ray_actors import RayLauncher, namespace, refuse_open
from pipeline.supervisor.launchers.ray_states import HeldWorker, HolderReport, NodeResources, why_waiting
from pipeline.supervisor.launchers.seam import Job, JobState
from protocol.errors import ConfigError
from protocol.ids import Role


def report(key: str = "k1", **changes: object) -> HolderReport:
    return HolderReport(**{"key": key, "place": "Ray node a on b", **changes})  # pyright: ignore[reportArgumentType]


def state(held: HeldWorker) -> tuple[JobState, str] | None:
    job = held.job("no node is free")
    return None if job is None else (job.state, job.reason)


def test_an_ordered_worker_waits_gets_its_token_once_and_runs() -> None:
    held = HeldWorker(Role.GENERATOR)
    held.order()
    assert state(held) == (JobState.WAITING, "no node is free") and not held.wants_token("t1")
    held.answered(report())
    assert held.wants_token("t1") and held.begins
    held.answered(report(has_begun=True, token="t1"))
    assert state(held) == (JobState.RUNNING, "") and not held.wants_token("t1") and not held.begins
    assert held.wants_token("t2"), "a rotated one"


def test_an_actor_that_ray_has_placed_again_gets_a_token_by_a_new_order_alone() -> None:
    held = HeldWorker(Role.GENERATOR)
    held.order()
    held.answered(report(has_begun=True, token="t1"))
    held.answered(report("k2"))
    assert held.job("") == Job(
        role=Role.GENERATOR, state=JobState.ENDED, place="Ray", reason="its Ray actor or node was lost"
    )
    assert not held.wants_token("t1") and not held.begins
    held.order()
    assert held.wants_token("t1") and state(held) == (JobState.WAITING, "it has a node and is starting")


def test_an_actor_without_a_place_loses_a_worker_that_ran_and_none_that_waits() -> None:
    waiting, running = HeldWorker(Role.REWARD), HeldWorker(Role.REWARD)
    for held in (waiting, running):
        held.order()
    running.answered(report(has_begun=True, token="t1"))
    for held in (waiting, running):
        held.unavailable()
    assert state(waiting) == (JobState.WAITING, "no node is free")
    assert state(running) == (JobState.ENDED, "its Ray actor or node was lost")


@pytest.mark.parametrize(
    "lose", [HeldWorker.unavailable, lambda held: held.answered(report("k2"))], ids=["away", "placed again"]
)
def test_a_worker_lost_before_its_first_report_does_not_begin_again_unordered(
    lose: Callable[[HeldWorker], None],
) -> None:
    held = HeldWorker(Role.GENERATOR)
    held.order()
    held.answered(report())
    assert not held.may_run
    held.was_given_token()
    assert held.may_run and state(held) == (JobState.WAITING, "it has a node and is starting")
    lose(held)
    assert state(held) == (JobState.ENDED, "its Ray actor or node was lost")
    held.answered(report("k2"))
    assert not held.wants_token("t1") and not held.begins and not held.may_run
    held.order()
    assert held.wants_token("t1")


def test_an_actor_that_no_supervisor_ordered_is_no_job() -> None:
    held = HeldWorker(Role.REWARD)
    held.answered(report())
    assert held.job("") is None and not held.wants_token("t1")


def test_an_ended_worker_has_its_exit_code_and_wants_no_token() -> None:
    held = HeldWorker(Role.REWARD)
    held.order()
    held.answered(report(has_begun=True, token="t1", exit_code=7))
    job = held.job("")
    assert job is not None and (job.state, job.exit_code) == (JobState.ENDED, 7)
    assert not held.wants_token("t2")


NODES = [NodeResources({"CPU": 4.0}, {"zone": "a"}), NodeResources({"CPU": 2.0, "GPU": 1.0}, {"zone": "b"})]


@pytest.mark.parametrize(
    ("wanted", "labels", "told"),
    [
        ({"CPU": 1.0}, {"zone": "c"}, "none of 2 nodes has the labels zone=c"),
        ({"CPU": 4.0}, {"zone": "b"}, "it needs CPU 4, and no node has more than CPU 2"),
        ({"CPU": 1.0, "GPU": 2.0}, {}, "it needs GPU 2, and no node has more than GPU 1"),
        ({"CPU": 4.0}, {}, "it needs CPU 4 on one node; CPU 3 are free in the cluster"),
    ],
)
def test_why_a_worker_waits_is_said_in_words(wanted: dict[str, float], labels: dict[str, str], told: str) -> None:
    assert why_waiting(wanted, labels, NODES, {"CPU": 3.0}).startswith(told)


def join(url: str = "rediss://one.example:6379/0") -> JoinCommand:
    return JoinCommand("demo", url, lambda role: Token(run="demo", role=role, id="x", secret="s" * 32))


def test_runs_of_one_name_at_two_ledgers_have_two_namespaces() -> None:
    assert namespace(join()) == namespace(join()) != namespace(join("rediss://two.example:6379/0"))


def test_a_cluster_that_is_open_to_all_is_refused() -> None:
    refuse_open(False)
    with pytest.raises(ConfigError, match=r"without a token.*RAY_AUTH_MODE=token.*allow_unauthenticated"):
        refuse_open(True)


def test_without_ray_the_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ray is not installed .* pip install 'headrace\[ray\]'"):
        RayLauncher(LaunchSection(on="ray"), join())


def test_an_address_of_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"ray://head:10001.*expected HOST:PORT"):
        RayLauncher(LaunchSection(on="ray", ray=RaySection(address="ray://head:10001")), join())
