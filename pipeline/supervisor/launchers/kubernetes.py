"""One pod per worker on a Kubernetes cluster, through kubectl.

A worker is drained by a signal sent inside its pod rather than by deleting the pod, so that its
exit code and last lines can be read. The pod stays until the worker is started again. Tokens are
passed to kubectl on standard input."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
import yaml

from pipeline.config.operations import LaunchSection, ResourcesSection
from pipeline.ledger.token import Token
from pipeline.process.exit_codes import from_shell
from pipeline.supervisor.launchers.join_command import NUM_LINES, JoinCommand, role_of
from pipeline.supervisor.launchers.programs import ask, call, require
from pipeline.supervisor.launchers.seam import Job, JobState
from protocol.ids import Role

# A run's Kubernetes objects, as plain values: worker pods, and the run's host.
#
#     StatefulSet RUN             the run's host: `headrace up`, with learner and value worker
#     Pod RUN-generator-0 ...     the fleet's workers, started and stopped by the run's host
#     Deployment RUN-generator-elastic ...   workers beyond the fleet, for an autoscaler
#     PodDisruptionBudget, Service, ConfigMap, ServiceAccount, Role, RoleBinding
#     Secret RUN-generator-token ...         written by the run's host when it starts a role
#
# Containers run as an ordinary user. An init container copies the token to a memory-backed file of
# mode 0600, because a Secret's volume is readable by the pod's group.

Manifest = dict[str, Any]

WORKER_LABEL: Final = "headrace/worker"
CONTAINER: Final = "worker"
METRICS_PORT: Final = 9464
_USER: Final = 1000
_GRACE_S: Final = 600
"""Time between SIGTERM and SIGKILL when a node is drained."""
_TOKEN: Final = "/token/token"  # noqa: S105  a path
_PROBE_S: Final = 20
_MAX_NAME: Final = 40
"""Leaves room for worker and suffix in a label's 63 characters."""


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


def token_secret(run: str, token: Token, text: str, namespace: str) -> Manifest:
    name = _secret_name(run, token.role)
    return _object("v1", "Secret", name, namespace, labels(run, token.role), type="Opaque", stringData={"token": text})


def worker_pod(settings: LaunchSection, join: JoinCommand, role: Role, worker: str) -> Manifest:
    """Return the pod of one worker of the fleet. The supervisor restarts it, not the kubelet."""
    own = labels(join.run, role) | {WORKER_LABEL: worker}
    words = join.words(role, worker, _TOKEN)
    spec = _worker_spec(settings, join, role, words) | {"restartPolicy": "Never"}
    return _object("v1", "Pod", pod_name(join.run, worker), settings.kubernetes.namespace, own, spec=spec)


def elastic_objects(settings: LaunchSection, join: JoinCommand, role: Role) -> list[Manifest]:
    """Return the Deployment and disruption budget of a role's workers beyond the fleet.
    ``replicas`` is left out, so that another `kubectl apply` does not undo an autoscaler."""
    name, namespace = f"{slug(join.run)}-{role}-elastic", settings.kubernetes.namespace
    own = labels(join.run, role) | {"headrace/elastic": "true"}
    words = join.words(role, "", _TOKEN)[:-2]
    deployment = {
        "selector": {"matchLabels": own},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 1}},
        "template": {"metadata": {"labels": own}, "spec": _worker_spec(settings, join, role, words)},
    }
    return [
        _object("apps/v1", "Deployment", name, namespace, own, spec=deployment),
        _object(
            "policy/v1",
            "PodDisruptionBudget",
            name,
            namespace,
            own,
            spec={"maxUnavailable": 1, "selector": {"matchLabels": own}},
        ),
    ]


def run_host_objects(settings: LaunchSection, run: str, config_toml: str) -> list[Manifest]:
    place, name, own = settings.kubernetes, slug(run), labels(run, Role.SUPERVISOR)
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "get", "list", "delete"]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "get", "patch", "update"]},
    ]
    account = {"kind": "ServiceAccount", "name": name, "namespace": place.namespace}
    role_ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    budget = {"maxUnavailable": 0, "selector": {"matchLabels": own}}
    ports = [{"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"}]
    service = {"clusterIP": "None", "selector": own, "ports": ports}
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        _object("v1", "ServiceAccount", name, place.namespace, own),
        _object(rbac, "Role", name, place.namespace, own, rules=rules),
        _object(rbac, "RoleBinding", name, place.namespace, own, subjects=[account], roleRef=role_ref),
        _object("v1", "ConfigMap", name, place.namespace, own, data={"run.toml": config_toml}),
        _object("v1", "Service", name, place.namespace, own, spec=service),
        _object("policy/v1", "PodDisruptionBudget", name, place.namespace, own, spec=budget),
        _object("apps/v1", "StatefulSet", name, place.namespace, own, spec=_run_host(settings, run, own)),
    ]


def _run_host(settings: LaunchSection, run: str, own: dict[str, str]) -> Manifest:
    place, name = settings.kubernetes, slug(run)
    program = " ".join(settings.program)
    # a finished run's pod stays, so that its folder can be read; a failed one is restarted
    script = (
        f"if [ -f /runs/{run}/config.toml ]; then set -- --resume /runs/{run}; else set -- /config/run.toml; fi\n"
        f'{program} up "$@" --plain --set run.dir=/runs --set supervisor.metrics_port={METRICS_PORT} '
        "--set supervisor.metrics_host=0.0.0.0 &\n"
        "trap 'kill -TERM $!' TERM\nwait $!; wait $! || exit $?\nexec sleep infinity\n"
    )
    container = {
        "name": "up",
        "image": place.image,
        "command": ["sh", "-c", script],
        "env": [
            # only the supervisor reads it; its workers get no copy
            {"name": "REDIS_URL", "valueFrom": {"secretKeyRef": {"name": f"{name}-ledger", "key": "url"}}},
            _pod_address(),
        ],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        **_probes(settings, f"/runs/{run}", startup_s=1800),
        "resources": _requests(settings.learner),
        "securityContext": _container_security(),
        "volumeMounts": [
            {"name": "runs", "mountPath": "/runs"},
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  in the container
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  in the container
        ],
    }
    pod = {
        "serviceAccountName": name,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": _pod_security(),
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}, _memory("shm"), {"name": "tmp", "emptyDir": {}}],
    }
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{place.storage_gb}Gi"}}}
    return {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": own},
        "template": {"metadata": {"labels": own}, "spec": pod},
        "volumeClaimTemplates": [{"metadata": {"name": "runs"}, "spec": claim}],
    }


def _worker_spec(settings: LaunchSection, join: JoinCommand, role: Role, words: list[str]) -> Manifest:
    place = settings.kubernetes
    copying: Manifest = {
        "name": "token",
        "image": place.image,
        "command": ["install", "-m", "600", "/secret/token", _TOKEN],
        "securityContext": _container_security(),
        "volumeMounts": [
            {"name": "secret", "mountPath": "/secret", "readOnly": True},
            {"name": "token", "mountPath": "/token"},
        ],
    }
    container: Manifest = {
        "name": CONTAINER,
        "image": place.image,
        "command": words,
        "env": [
            *({"name": name, "value": "/cache"} for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "HOME")),
            _pod_address(),
        ],
        **_probes(settings, "", startup_s=1800),
        "resources": _requests(settings.resources(role)),
        "securityContext": _container_security(),
        "volumeMounts": [
            {"name": "token", "mountPath": "/token"},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  in the container
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  in the container
        ],
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_S,
        "securityContext": _pod_security(),
        "initContainers": [copying],
        "containers": [container],
        "volumes": [
            {"name": "secret", "secret": {"secretName": _secret_name(join.run, role), "defaultMode": 0o440}},
            _memory("token"),
            _memory("shm"),
            {"name": "cache", "emptyDir": {"sizeLimit": f"{place.cache_gb}Gi"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _probes(settings: LaunchSection, folder: str, *, startup_s: int) -> Manifest:
    """Return the probes of a supervisor's container. A supervisor that has ended counts as live."""

    def asking(question: str, failures: int) -> Manifest:
        command = [*settings.program, "fleet", "probe", question, *([folder] if folder else [])]
        times = {"periodSeconds": _PROBE_S, "timeoutSeconds": _PROBE_S, "failureThreshold": failures}
        return {"exec": {"command": command}} | times

    return {
        "startupProbe": asking("live", startup_s // _PROBE_S),
        "livenessProbe": asking("live", 3),
        "readinessProbe": asking("ready", 1),
    }


def _secret_name(run: str, role: Role) -> str:
    return f"{slug(run)}-{role}-token"


def _object(version: str, kind: str, name: str, namespace: str, own: dict[str, str], **body: Any) -> Manifest:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace, "labels": own},
    } | body


def _requests(wanted: ResourcesSection) -> Manifest:
    requests = {"cpu": str(wanted.cpus)}
    limits: dict[str, str] = {}
    if wanted.memory_gb is not None:
        requests["memory"] = limits["memory"] = f"{wanted.memory_gb}Gi"
    if wanted.gpus:
        limits["nvidia.com/gpu"] = str(wanted.gpus)
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _memory(name: str) -> Manifest:
    return {"name": name, "emptyDir": {"medium": "Memory"}}


def _pod_address() -> Manifest:
    return {"name": "HEADRACE_ADVERTISE_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def _pod_security() -> Manifest:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _container_security() -> Manifest:
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


_STATES = {"Pending": JobState.WAITING, "Running": JobState.RUNNING}


class KubernetesLauncher:
    """Starts a run's workers as pods.

    Raises ConfigError: kubectl is not on PATH."""

    def __init__(self, settings: LaunchSection, join: JoinCommand) -> None:
        require("kubectl", why="launch.on is kubernetes")
        self._settings, self._join = settings, join
        place = settings.kubernetes
        context = [f"--context={place.context}"] if place.context is not None else []
        self._kubectl = ["kubectl", *context, f"--namespace={place.namespace}"]

    def start(self, role: Role, worker: str, /) -> None:
        """Write the role's Secret, and create a pod in place of an ended one."""
        token = self._join.token_of(role)
        text = msgspec.json.encode(token).decode()
        run, namespace = self._join.run, self._settings.kubernetes.namespace
        # server-side: a client-side `apply` would copy the secret into an annotation
        secret = token_secret(run, token, text, namespace)
        self._call("apply", "--server-side", "--force-conflicts", "--filename=-", text=json.dumps(secret))
        self._delete(worker, wait=True)
        pod = worker_pod(self._settings, self._join, role, worker)
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
    found = run_host_objects(settings, join.run, config_toml)
    for role in roles:
        if role not in by_supervisor:
            found += elastic_objects(settings, join, role)
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
