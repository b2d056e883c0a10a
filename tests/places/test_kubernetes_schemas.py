"""Claims about Kubernetes objects, by the schemas of Kubernetes' API. They need an environment with
kubernetes-validate: ``make test-places``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config.operations import LaunchSection, ResourcesSection
from pipeline.supervisor.launchers.kubernetes import Manifest, manifests, worker_objects
from protocol.ids import Role
from tests.pipeline.supervisor.launchers.place_tools import join_command

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make test-places installs it")

VERSIONS = ("1.29", "1.37")
"""The oldest and the newest version of Kubernetes that the objects are for."""
SETTINGS = LaunchSection(generator=ResourcesSection(cpus=8, gpus=1, memory_gb=64))


def all_objects(folder: Path) -> list[Manifest]:
    join = join_command(folder)
    roles = {Role.GENERATOR: 2, Role.REWARD: 1, Role.REFERENCE: 1}
    of_worker = worker_objects(SETTINGS, join, Role.GENERATOR, "generator-0", "a token")
    return [*yaml.safe_load_all(manifests(SETTINGS, join, roles, "[run]\n")), *of_worker]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_strict_schema_of_its_kind(tmp_path: Path, version: str) -> None:
    kinds = set[str]()
    for one in all_objects(tmp_path):
        assert kubernetes_validate.validate(one, version, strict=True) == version
        kinds.add(one["kind"])
    assert len(kinds) == 10


def test_an_object_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (pod,) = (one for one in all_objects(tmp_path) if one["kind"] == "Pod")
    pod["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(pod, VERSIONS[0], strict=True)
