"""One pod per worker on a Kubernetes cluster, through kubectl.

A worker is drained by a signal sent inside its pod rather than by deleting the pod, so that its
exit code and last lines can be read. The pod stays until the worker is started again. Tokens are
passed to kubectl on standard input."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
import msgspec
import yaml

from pipeline.config.operations import LaunchSection, ResourcesSection
from pipeline.files import NUM_LINES
from pipeline.process.exit_codes import from_shell
from pipeline.supervisor.launchers.commands import JoinCommand, ask, call, require, role_of
from pipeline.supervisor.launchers.seam import ConfiguredLauncher, Job, JobState
from protocol.errors import ConfigError
from protocol.ids import Role

Manifest = dict[str, Any]

WORKER_LABEL: Final = "headrace/worker"
CONTAINER: Final = "worker"
_TOKEN: Final = "/token/token"  # noqa: S105  a path
_MAX_NAME: Final = 40
"""Leaves room for worker and suffix in a label's 63 characters."""
_TEMPLATES: Final = (Path(__file__).with_name("manifests"), Path(__file__).parents[3] / "ops" / "kubernetes")
"""The folder of an installed Headrace, and that of a checkout."""


def slug(run: str) -> str:
    """Return a run's name as Kubernetes allows it, unique to the run."""
    plain = re.sub(r"[^a-z0-9-]", "-", run.lower()).strip("-") or "run"
    if plain == run and len(run) <= _MAX_NAME and plain[0].isalpha():
        return run
    return f"run-{plain[: _MAX_NAME - 14].strip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def labels(run: str, role: Role) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "headrace",
        "app.kubernetes.io/instance": slug(run),
        "app.kubernetes.io/component": str(role),
    }


def pod_name(run: str, worker: str) -> str:
    return f"{slug(run)}-{worker}"


def worker_objects(
    settings: LaunchSection, join: JoinCommand, role: Role, worker: str, token: str
) -> tuple[Manifest, Manifest]:
    """Return the Secret and the pod of one worker of the fleet. Raises ConfigError: the templates do
    not make these two objects."""
    own = _worker(settings, join, role, join.words(role, worker, _TOKEN), pod_name(join.run, worker))
    found = _rendered("worker.yaml", settings, join, worker=own | {"worker": worker}, token=token)
    if [one["kind"] for one in found] != ["Secret", "Pod"]:
        raise ConfigError("the template worker.yaml of launch.kubernetes.templates must make a Secret and then a Pod")
    return found[0], found[1]


def _worker(settings: LaunchSection, join: JoinCommand, role: Role, command: list[str], name: str) -> Manifest:
    return {
        "name": name,
        "labels": labels(join.run, role),
        "secret": f"{slug(join.run)}-{role}-token",
        "command": command,
        "resources": _requests(settings.resources(role)),
    }


def _rendered(template: str, settings: LaunchSection, join: JoinCommand, **values: Any) -> list[Manifest]:
    """Fill in a template; return its objects. Raises ConfigError: it does not make YAML."""
    place = settings.kubernetes
    own = () if place.templates is None else (place.templates.expanduser(),)
    if own and not own[0].is_dir():
        raise ConfigError(
            f"launch.kubernetes.templates is {own[0]}; expected a folder on this host with changed templates"
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*own, *_TEMPLATES]), undefined=jinja2.StrictUndefined, finalize=_quoted,
        trim_blocks=True, autoescape=False,  # noqa: S701  YAML, not HTML
    )  # fmt: skip
    shared = place.model_dump() | {"name": slug(join.run), "run": join.run, "program": list(settings.program)}
    try:
        text = environment.get_template(template).render(shared | {"token_file": _TOKEN} | values)
        found = [one for one in yaml.safe_load_all(text) if one is not None]
        if not all(isinstance(one, dict) and "kind" in one for one in found):
            raise yaml.YAMLError("each document must be an object with a kind")
    except (jinja2.TemplateError, yaml.YAMLError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"the template {template} of launch.kubernetes.templates makes no Kubernetes objects: {reason}; compare it with "
            "Headrace's own"
        ) from error
    return found


def _quoted(value: object) -> str:
    """Return a value as YAML on one line, its texts in double quotes."""
    if isinstance(value, int | jinja2.Undefined):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True, default_style='"', width=math.inf).rstrip("\n")


def _requests(wanted: ResourcesSection) -> Manifest:
    requests = {"cpu": str(wanted.cpus)}
    limits: dict[str, str] = {}
    if wanted.memory_gb is not None:
        requests["memory"] = limits["memory"] = f"{wanted.memory_gb}Gi"
    if wanted.gpus:
        limits["nvidia.com/gpu"] = str(wanted.gpus)
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


_STATES = {"Pending": JobState.WAITING, "Running": JobState.RUNNING}


class KubernetesLauncher(ConfiguredLauncher):
    """Starts a run's workers as pods.

    Raises ConfigError: kubectl is not on PATH, or a template is wrong."""

    def __init__(self, settings: LaunchSection, join: JoinCommand) -> None:
        require("kubectl", why="launch.on is kubernetes")
        self._settings, self._join = settings, join
        place = settings.kubernetes
        context = [f"--context={place.context}"] if place.context is not None else []
        self._kubectl = ["kubectl", *context, f"--namespace={place.namespace}"]
        worker_objects(settings, join, Role.GENERATOR, "generator-0", token="")

    def start(self, role: Role, worker: str, /) -> None:
        """Write the role's Secret, and create a pod in place of an ended one."""
        token = msgspec.json.encode(self._join.token_of(role)).decode()
        secret, pod = worker_objects(self._settings, self._join, role, worker, token)
        # server-side: a client-side `apply` would copy the secret into an annotation
        self._call("apply", "--server-side", "--force-conflicts", "--filename=-", text=json.dumps(secret))
        self._delete(worker, wait=True)
        self._call("create", "--filename=-", text=json.dumps(pod))

    def stop(self, worker: str, /, *, now: bool = False) -> None:
        """Signal a running worker inside its pod; delete a waiting pod, or with ``now`` any pod."""
        job = self.listing().get(worker)
        if job is None or job.state is JobState.ENDED:
            return
        if now or job.state is JobState.WAITING:
            self._delete(worker, wait=False)
        else:
            pod = pod_name(self._join.run, worker)
            self._call("exec", pod, f"--container={CONTAINER}", "--", "sh", "-c", "kill -TERM 1")

    def listing(self) -> dict[str, Job]:
        instance = f"app.kubernetes.io/instance={slug(self._join.run)}"
        output = self._call("get", "pods", f"--selector={instance},{WORKER_LABEL}", "--output=json")
        jobs: dict[str, Job] = {}
        for pod in json.loads(output)["items"]:
            worker = pod["metadata"]["labels"][WORKER_LABEL]
            role = role_of(worker)
            if role is not None:
                jobs[worker] = _job(role, pod)
        return jobs

    def logs(self, worker: str, /) -> str:
        pod = pod_name(self._join.run, worker)
        words = [*self._kubectl, "logs", pod, f"--container={CONTAINER}", f"--tail={NUM_LINES}"]
        return ask(words, timeout_s=self._settings.answer_s).output.rstrip("\n")

    def _delete(self, worker: str, *, wait: bool) -> None:
        words = ["delete", "pod", pod_name(self._join.run, worker), "--ignore-not-found", "--grace-period=1"]
        self._call(*words, f"--wait={str(wait).lower()}")

    def _call(self, *words: str, text: str = "") -> str:
        return call([*self._kubectl, *words], timeout_s=self._settings.answer_s, text=text)


def manifests(
    settings: LaunchSection,
    join: JoinCommand,
    roles: Mapping[Role, int],
    config_toml: str,
    *,
    by_supervisor: Collection[Role] = (),
) -> str:
    """Return a run's objects for `kubectl apply` as YAML: the run's host and the elastic workers.

    ``roles``: worker counts of the fleet, whose pods the run's host starts itself.
    ``by_supervisor``: roles that the supervisor autoscales, which get no elastic workers."""
    elastic = [
        _worker(settings, join, role, join.words(role, "", _TOKEN)[:-2], f"{slug(join.run)}-{role}-elastic")
        for role in roles
        if role not in by_supervisor
    ]
    for worker in elastic:
        worker["labels"]["headrace/elastic"] = "true"
    own, wanted = labels(join.run, Role.SUPERVISOR), _requests(settings.learner)
    found = _rendered(
        "run.yaml", settings, join, labels=own, resources=wanted, elastic=elastic, config_toml=config_toml
    )
    name = slug(join.run)
    head = (
        f"# Objects of the run {join.run}. First the ledger's address, with its password:\n"
        f"#   kubectl --namespace={settings.kubernetes.namespace} create secret generic {name}-ledger --from-file=url=FILE\n"
    )
    return head + yaml.safe_dump_all(found, sort_keys=False, width=120, explicit_start=True)


def _job(role: Role, pod: Mapping[str, Any]) -> Job:
    status, node = pod.get("status", {}), pod.get("spec", {}).get("nodeName", "")
    place = f"pod {pod['metadata']['name']}" + (f" on {node}" if node else "")
    phase = status.get("phase", "Pending")
    if phase in _STATES:
        return Job(role, _STATES[phase], place, reason=_why_waiting(status))
    ended = _of_worker(status).get("state", {}).get("terminated", {})
    reason = ended.get("reason", "") or status.get("reason", "")
    code = ended.get("exitCode")
    return Job(role, JobState.ENDED, place, None if code is None else from_shell(code), reason)


def _of_worker(status: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = status.get("containerStatuses", [])
    return next((one for one in containers if one.get("name") == CONTAINER), {})


def _why_waiting(status: Mapping[str, Any]) -> str:
    waiting = _of_worker(status).get("state", {}).get("waiting", {})
    unmet = (one for one in status.get("conditions", []) if one.get("status") == "False" and one.get("message"))
    words = [waiting.get("reason", ""), waiting.get("message", ""), next((one["message"] for one in unmet), "")]
    return ": ".join(word for word in words if word)
