"""Claims about the launcher of pods: the contract, on a stand-in for kubectl that keeps to its
interface. No cluster runs here. ``make test-places`` checks the objects by Kubernetes' schemas."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.operations import KubernetesSection, LaunchSection, ResourcesSection
from pipeline.supervisor.launchers import kubernetes as objects
from pipeline.supervisor.launchers.kubernetes import KubernetesLauncher, manifests
from pipeline.supervisor.launchers.seam import JobState, LaunchFailed
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.supervisor.launchers import kubectl_stand_in
from tests.pipeline.supervisor.launchers.contract import FarLauncherContract, until
from tests.pipeline.supervisor.launchers.kubectl_stand_in import Cluster
from tests.pipeline.supervisor.launchers.place_tools import (
    SECRET,
    assert_no_secret_but_in_a_private_file,
    join_command,
    put_on_path,
)


class KubernetesPlace:
    """A stand-in for a cluster."""

    programs = ("kubectl",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder / "cluster")
        self.cluster.folder.mkdir()
        self.settings = LaunchSection()

    def launcher(self) -> KubernetesLauncher:
        return KubernetesLauncher(self.settings, join_command(self.folder))

    def set_answer_s(self, limit_s: float) -> None:
        self.settings = LaunchSection(answer_s=limit_s)

    def crash(self, worker: str) -> None:
        (self.folder / f"crash-{worker}").touch()

    def lose(self, worker: str) -> None:
        name = objects.pod_name("demo", worker)
        pod = self.cluster.read("Pod", name)
        assert pod is not None
        (self.cluster.folder / f"Pod.{name}").unlink()
        os.killpg(pod["pid"], signal.SIGKILL)

    def close(self) -> None:
        for path in self.cluster.folder.glob("Pod.*"):
            with suppress(ProcessLookupError, KeyError):
                os.killpg(json.loads(path.read_text())["pid"], signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesPlace]:
    found = KubernetesPlace(tmp_path)
    words = (sys.executable, kubectl_stand_in.__file__, str(found.cluster.folder))
    put_on_path(tmp_path / "bin", {"kubectl": words}, monkeypatch)
    yield found
    found.close()


class TestKubernetes(FarLauncherContract):
    """The contract, by pods."""


def test_a_pending_pod_is_listed_with_its_reason_and_can_be_deleted(place: KubernetesPlace) -> None:
    (place.cluster.folder / "hold").touch()
    launcher = place.launcher()
    launcher.start(Role.REWARD, "reward-0")
    job = launcher.listing()["reward-0"]
    assert (job.state, job.reason) == (JobState.WAITING, "0/3 nodes are available")
    launcher.stop("reward-0")
    assert launcher.listing() == {}


def test_a_pod_gets_its_token_by_a_secret_alone(place: KubernetesPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:ledger-password@127.0.0.1:1/0")
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until(lambda: "begun" in launcher.logs("generator-0"))
    assert_no_secret_but_in_a_private_file(place.folder, "generator-0")
    assert SECRET not in json.dumps(place.cluster.read("Pod", "demo-generator-0"))


def test_a_refusal_is_told_in_kubernetes_words(place: KubernetesPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.cluster.folder / "hold").touch()
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    monkeypatch.setattr(launcher, "_delete", lambda *_, **__: None)
    with pytest.raises(LaunchFailed, match="kubectl failed with code 1: Error from server \\(AlreadyExists\\)"):
        launcher.start(Role.GENERATOR, "generator-0")


def test_a_host_without_kubectl_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"launch\.on is kubernetes, but there is no kubectl on PATH"):
        KubernetesLauncher(LaunchSection(), join_command(tmp_path))


@pytest.mark.parametrize("run", ["Demo_1.2", "x" * 64, "7up", "demo-", "a.b", "a_b"])
def test_a_name_that_kubernetes_refuses_is_made_unique(run: str) -> None:
    name = objects.slug(run)
    assert name != run and len(name) <= 40 and name[0].isalpha() and name.replace("-", "").isalnum() and name.islower()
    assert objects.slug("demo") == "demo" and len({objects.slug(one) for one in ("a.b", "a_b", "a-b")}) == 3


def made(tmp_path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    settings = LaunchSection(
        generator=ResourcesSection(cpus=4, gpus=1, memory_gb=32), kubernetes=KubernetesSection(namespace="training")
    )
    text = manifests(settings, join_command(tmp_path), {Role.GENERATOR: 2, Role.REWARD: 1}, "[run]\n")
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}


def test_a_run_has_a_host_elastic_workers_and_what_guards_them(tmp_path: Path) -> None:
    found = made(tmp_path)
    of_host = ("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Service", "PodDisruptionBudget", "StatefulSet")
    elastic = ("Deployment", "PodDisruptionBudget")
    wanted = {(kind, "demo") for kind in of_host}
    wanted |= {(kind, f"demo-{role}-elastic") for kind in elastic for role in ("generator", "reward")}
    assert set(found) == wanted
    assert all(one["metadata"]["namespace"] == "training" for one in found.values())
    assert SECRET not in str(found)


def test_generators_whose_number_the_supervisor_sets_have_no_second_autoscaler(tmp_path: Path) -> None:
    roles = {Role.GENERATOR: 2, Role.REWARD: 1}
    text = manifests(LaunchSection(), join_command(tmp_path), roles, "[run]\n", by_supervisor=[Role.GENERATOR])
    names = {one["metadata"]["name"] for one in yaml.safe_load_all(text)}
    assert "demo-reward-elastic" in names and "demo-generator-elastic" not in names


def test_every_supervisor_is_asked_by_probes_and_not_by_its_metrics(tmp_path: Path) -> None:
    found: dict[tuple[str, str], Any] = made(tmp_path)
    for (kind, _), one in found.items():
        if kind in ("Deployment", "StatefulSet"):
            (container,) = one["spec"]["template"]["spec"]["containers"]
            asked = {
                name: container[f"{name}Probe"]["exec"]["command"][3] for name in ("startup", "liveness", "readiness")
            }
            assert asked == {"startup": "live", "liveness": "live", "readiness": "ready"}
    pod = found["StatefulSet", "demo"]["spec"]["template"]["spec"]["containers"][0]
    assert pod["livenessProbe"]["exec"]["command"][-1] == "/runs/demo"


def test_elastic_workers_have_names_of_their_own(tmp_path: Path) -> None:
    deployment: dict = made(tmp_path)["Deployment", "demo-generator-elastic"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--name" not in container["command"] and container["command"][-2:] == ["--role", "generator"]
    assert container["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": "1"}


def test_every_container_is_unprivileged_and_every_selector_meets_its_pods(tmp_path: Path) -> None:
    for (kind, _), one in made(tmp_path).items():
        if kind in ("Deployment", "StatefulSet"):
            spec: dict = one["spec"]
            pod = spec["template"]
            assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
            for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
                assert container["securityContext"]["readOnlyRootFilesystem"]
                mounts = {mount["name"] for mount in container["volumeMounts"]}
                claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
                assert mounts <= {volume["name"] for volume in pod["spec"]["volumes"]} | claims


def with_templates(folder: Path, name: str, text: str) -> LaunchSection:
    (folder / name).write_text(text)
    return LaunchSection(kubernetes=KubernetesSection(templates=folder))


def test_an_operators_copy_of_a_template_takes_its_place_and_the_others_stay(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "ops" / "kubernetes" / "worker-spec.yaml").read_text()
    settings = with_templates(tmp_path, "worker-spec.yaml", f"nodeSelector: {{pool: gpu}}\n{text}")
    _, pod = objects.worker_objects(settings, join_command(tmp_path), Role.REWARD, "reward-0", "a token")
    assert pod["spec"].pop("nodeSelector") == {"pool": "gpu"}
    _, own = objects.worker_objects(LaunchSection(), join_command(tmp_path), Role.REWARD, "reward-0", "a token")
    assert pod == own
    found = list(yaml.safe_load_all(manifests(settings, join_command(tmp_path), {Role.REWARD: 1}, "")))
    assert [one["spec"]["template"]["spec"].get("nodeSelector") for one in found if one["kind"] == "Deployment"] == [
        {"pool": "gpu"}
    ]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("worker.yaml", "kind: {{ no_such_value }}", "'no_such_value' is undefined"),
        ("worker.yaml", "{% if %}", "TemplateSyntaxError"),
        ("worker.yaml", "a: b: c", "mapping values are not allowed here"),
        ("worker.yaml", "kind: Pod", "a Secret and then a Pod"),
        ("worker.yaml", "only text", "each document must be an object with a kind"),
        ("worker-spec.yaml", "  - {{ image", "TemplateSyntaxError"),
    ],
)
def test_a_wrong_template_is_refused_before_anything_starts(
    place: KubernetesPlace, tmp_path: Path, name: str, text: str, why: str
) -> None:
    settings = with_templates(tmp_path, name, text)
    with pytest.raises(ConfigError, match=re.escape(why)):
        KubernetesLauncher(settings, join_command(tmp_path))


def test_a_folder_of_templates_that_is_missing_is_named(place: KubernetesPlace, tmp_path: Path) -> None:
    settings = LaunchSection(kubernetes=KubernetesSection(templates=tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"launch\.kubernetes\.templates is .*none; expected a folder"):
        KubernetesLauncher(settings, join_command(tmp_path))


def test_any_text_in_the_configuration_arrives_as_it_is(tmp_path: Path) -> None:
    text = "a: 'b' \"{{ c }}\" \u2028 \x85 \U0001f600 \\n # d\n\ttab: {}\n"
    found = list(yaml.safe_load_all(manifests(LaunchSection(), join_command(tmp_path), {}, text)))
    assert [one["data"]["run.toml"] for one in found if one["kind"] == "ConfigMap"] == [text]


def test_the_runs_host_starts_a_run_and_resumes_one_that_has_begun(tmp_path: Path) -> None:
    """The script of the pod, with other folders, and a program that prints its arguments."""
    pod = made(tmp_path)["StatefulSet", "demo"]["spec"]["template"]["spec"]["containers"][0]
    shell, flag, script = pod["command"]
    script = script.replace("/runs", str(tmp_path / "runs")).replace("exec sleep infinity", "exit 0")
    words = [shell, flag, script, *pod["args"][:2], sys.executable, "-c", "import sys; print(sys.argv[1:4])"]
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert subprocess.check_output(words, text=True).strip() == "['up', '/config/run.toml', '--plain']"
    (tmp_path / "runs" / "demo" / "config.toml").touch()
    assert subprocess.check_output(words, text=True).startswith(f"['up', '--resume', '{tmp_path}/runs/demo'")
