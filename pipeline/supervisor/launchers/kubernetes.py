"""Pods of a Kubernetes cluster: one a worker, by kubectl.

A worker drains on a signal that is sent inside of its pod, so that its end and its last lines can
be read. Its pod stays until the worker is started again. The secret of a token goes to kubectl on
its input."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import yaml

from pipeline.config.operations import LaunchSection
from pipeline.process.exit_codes import from_shell
from pipeline.supervisor.launchers import kubernetes_objects as objects
from pipeline.supervisor.launchers.join_command import JoinCommand, role_of
from pipeline.supervisor.launchers.output_tail import NUM_LINES
from pipeline.supervisor.launchers.programs import ask, call, require
from pipeline.supervisor.launchers.seam import Job, JobState
from protocol.ids import Role

_STATES = {"Pending": JobState.WAITING, "Running": JobState.RUNNING}


class KubernetesLauncher:
    """Starts pods of one run.

    Raises ConfigError: kubectl is not on PATH."""

    def __init__(self, settings: LaunchSection, join: JoinCommand) -> None:
        require("kubectl", why="launch.on is kubernetes")
        self._settings, self._join = settings, join
        place = settings.kubernetes
        context = [f"--context={place.context}"] if place.context is not None else []
        self._kubectl = ["kubectl", *context, f"--namespace={place.namespace}"]

    def start(self, role: Role, worker: str, /) -> None:
        """Write the role's Secret, and make a pod in place of an ended one."""
        token = self._join.token_of(role)
        text = msgspec.json.encode(token).decode()
        run, namespace = self._join.run, self._settings.kubernetes.namespace
        # `apply` would keep a copy of the secret in an annotation.
        secret = objects.token_secret(run, token, text, namespace)
        self._call("apply", "--server-side", "--force-conflicts", "--filename=-", text=json.dumps(secret))
        self._delete(worker, wait=True)
        pod = objects.worker_pod(self._settings, self._join, role, worker)
        self._call("create", "--filename=-", text=json.dumps(pod))

    def stop(self, worker: str, /, *, now: bool = False) -> None:
        """Signal a running worker in its pod; delete a pod that waits, or with ``now`` any."""
        job = self.listing().get(worker)
        if job is None or job.state is JobState.ENDED:
            return
        if now or job.state is JobState.WAITING:
            self._delete(worker, wait=False)
        else:
            pod = objects.pod_name(self._join.run, worker)
            self._call("exec", pod, f"--container={objects.CONTAINER}", "--", "sh", "-c", "kill -TERM 1")

    def listing(self) -> dict[str, Job]:
        """Return the pods of the fleet's workers; one whose node is lost is gone."""
        instance = f"app.kubernetes.io/instance={objects.slug(self._join.run)}"
        output = self._call("get", "pods", f"--selector={instance},{objects.WORKER_LABEL}", "--output=json")
        jobs: dict[str, Job] = {}
        for pod in json.loads(output)["items"]:
            worker = pod["metadata"]["labels"][objects.WORKER_LABEL]
            role = role_of(worker)
            if role is not None:
                jobs[worker] = _job(role, pod)
        return jobs

    def logs(self, worker: str, /) -> str:
        """Return the last lines of its container; empty where it has not begun."""
        pod = objects.pod_name(self._join.run, worker)
        words = [*self._kubectl, "logs", pod, f"--container={objects.CONTAINER}", f"--tail={NUM_LINES}"]
        return ask(words, timeout_s=self._settings.answer_s).output.rstrip("\n")

    def _delete(self, worker: str, *, wait: bool) -> None:
        words = ["delete", "pod", objects.pod_name(self._join.run, worker), "--ignore-not-found", "--grace-period=1"]
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
    """Return what `kubectl apply` makes of a run, as YAML: the run's host and the elastic workers.
    ``roles``: numbers of the fleet's workers, whose pods the run's host starts itself.
    ``by_supervisor``: roles whose number the supervisor sets by demand; for them there is no second
    autoscaler."""
    found = objects.run_host_objects(settings, join.run, config_toml)
    for role in roles:
        if role not in by_supervisor:
            found += objects.elastic_objects(settings, join, role)
    name = objects.slug(join.run)
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
    return next((one for one in containers if one.get("name") == objects.CONTAINER), {})


def _why_waiting(status: Mapping[str, Any]) -> str:
    """Return why a pod waits: its image, or no node."""
    waiting = _of_worker(status).get("state", {}).get("waiting", {})
    unmet = (one for one in status.get("conditions", []) if one.get("status") == "False" and one.get("message"))
    words = [waiting.get("reason", ""), waiting.get("message", ""), next((one["message"] for one in unmet), "")]
    return ": ".join(word for word in words if word)
