"""A stand-in for kubectl and a cluster on one host, with the parts of its interface that are used.

    python kubectl_stand_in.py STATE --namespace=NAME COMMAND ARGUMENT ...

A pod's command runs as a process. Its token comes from the Secret that its volume names, as the
init container would copy it. Pods stay pending while ``STATE/hold`` exists."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class Cluster:
    """The objects of all namespaces, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, kind: str, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{kind}.{name}"
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, kind: str, name: str, value: dict[str, Any]) -> None:
        partial = self.folder / f".{kind}.{name}.{os.getpid()}"
        partial.write_text(json.dumps(value))
        partial.rename(self.folder / f"{kind}.{name}")

    def apply(self, arguments: list[str]) -> int:
        assert arguments == ["--server-side", "--force-conflicts", "--filename=-"], arguments
        given = json.loads(sys.stdin.read())
        self.write(given["kind"], given["metadata"]["name"], given)
        return 0

    def create(self, arguments: list[str]) -> int:
        assert arguments == ["--filename=-"], arguments
        pod = json.loads(sys.stdin.read())
        name = pod["metadata"]["name"]
        if self.read("Pod", name) is not None:
            print(f'Error from server (AlreadyExists): pods "{name}" already exists', file=sys.stderr)
            return 1
        pod["status"] = {"phase": "Pending", "conditions": [{"status": "False", "message": "0/3 nodes are available"}]}
        self.write("Pod", name, pod)
        if not (self.folder / "hold").exists():
            words = [sys.executable, __file__, str(self.folder), "--namespace=default", "kubelet", name]
            subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return 0

    def kubelet(self, arguments: list[str]) -> int:
        (name,) = arguments
        pod = self.read("Pod", name)
        assert pod is not None
        container = pod["spec"]["containers"][0]
        (init,) = pod["spec"]["initContainers"]
        assert init["command"][:3] == ["install", "-m", "600"]
        (volume,) = (one["secret"] for one in pod["spec"]["volumes"] if "secret" in one)
        secret = self.read("Secret", volume["secretName"])
        assert secret is not None
        token = self.folder / f"token.{name}"
        token.touch(0o600)
        token.write_text(secret["stringData"]["token"])
        command = [str(token) if word == init["command"][-1] else word for word in container["command"]]
        with (self.folder / f"log.{name}").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        pod["status"] = {"phase": "Running"}
        pod["spec"]["nodeName"] = "node-7"
        pod["pid"] = process.pid
        self.write("Pod", name, pod)
        code = process.wait()
        if self.read("Pod", name) is not None:
            ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Completed" if code == 0 else "Error"}
            statuses = [{"name": container["name"], "state": {"terminated": ended}}]
            pod["status"] = {"phase": "Failed" if code else "Succeeded", "containerStatuses": statuses}
            self.write("Pod", name, pod)
        return 0

    def get(self, arguments: list[str]) -> int:
        kind, selector, output = arguments
        assert (kind, output) == ("pods", "--output=json"), arguments
        pods = [json.loads(path.read_text()) for path in sorted(self.folder.glob("Pod.*"))]
        print(json.dumps({"items": [pod for pod in pods if self._fits(pod, selector.removeprefix("--selector="))]}))
        return 0

    @staticmethod
    def _fits(pod: dict[str, Any], selector: str) -> bool:
        labels = pod["metadata"]["labels"]
        pairs = [part.partition("=") for part in selector.split(",")]
        return all(name in labels and (not equals or labels[name] == value) for name, equals, value in pairs)

    def delete(self, arguments: list[str]) -> int:
        kind, name, *options = arguments
        assert kind == "pod" and options[:2] == ["--ignore-not-found", "--grace-period=1"], arguments
        pod = self.read("Pod", name)
        if pod is not None:
            (self.folder / f"Pod.{name}").unlink()
            if pod["status"]["phase"] == "Running":
                with suppress(ProcessLookupError):
                    os.killpg(pod["pid"], signal.SIGTERM)
                    time.sleep(0.01)
                    os.killpg(pod["pid"], signal.SIGKILL)
        return 0

    def exec(self, arguments: list[str]) -> int:
        name, _, dashes, *command = arguments
        pod = self.read("Pod", name)
        assert dashes == "--" and command == ["sh", "-c", "kill -TERM 1"] and pod is not None, arguments
        os.kill(pod["pid"], signal.SIGTERM)
        return 0

    def logs(self, arguments: list[str]) -> int:
        name, _, tail = arguments
        path = self.folder / f"log.{name}"
        pod = self.read("Pod", name)
        if pod is None or pod["status"]["phase"] == "Pending":
            print(f'Error from server (NotFound): pods "{name}" not found', file=sys.stderr)
            return 1
        print("\n".join(path.read_text().splitlines()[-int(tail.removeprefix("--tail=")) :]))
        return 0


def main() -> int:
    state, namespace, command, *arguments = sys.argv[1:]
    assert namespace.startswith("--namespace="), namespace
    return getattr(Cluster(Path(state)), command)(arguments)


if __name__ == "__main__":
    sys.exit(main())
