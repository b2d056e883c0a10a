"""Claims about workers on Ray, without Ray: ``tests/ray`` has a real cluster."""

from __future__ import annotations

import importlib.util

import pytest

from pipeline.config.operations import LaunchSection, RaySection
from pipeline.ledger.token import Token
from pipeline.supervisor.launchers.commands import JoinCommand
from pipeline.supervisor.launchers.ray_actors import RayLauncher, namespace, refuse_open
from pipeline.supervisor.launchers.ray_agent import Needs, why_waiting
from protocol.errors import ConfigError

NODES = [
    {"Resources": {"CPU": 4.0}, "Labels": {"zone": "a"}},
    {"Resources": {"CPU": 2.0, "GPU": 1.0}, "Labels": {"zone": "b"}},
]


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
    assert why_waiting(Needs(wanted, labels), NODES, {"CPU": 3.0}).startswith(told)


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
