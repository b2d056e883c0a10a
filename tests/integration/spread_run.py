"""A run on several hosts that share nothing but the ledger and the wire: namespaces of one machine.

*Consumes* run files, overrides, and the right to make namespaces. *Produces* the run's folder on
the first host, a joined folder on each other one. *Waits for* the ledger's server, commands and the
run, each within a limit.

Each host has a home folder that no other host sees: model, data, run, cache and token are in it. A
token is copied, as an operator would."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ops.hosts.namespaces import Host, HostNetwork
from pipeline.ledger.server.binary import find_server
from protocol.errors import DataError
from protocol.ids import Role

ROOT = Path(__file__).resolve().parents[2]
PORT = 6379
_COMMAND_S = 120.0
_END_S = 60.0
_POLL_S = 0.1
_SECRETS = ("REDIS", "HEADRACE", "XDG")
"""Variables of this process that no host gets, by their beginnings."""


class SpreadRun:
    """One run, as a context manager. Commands that fail raise DataError with what they printed."""

    def __init__(self, network: HostNetwork, folder: Path) -> None:
        """Take the hosts of ``network``; homes are folders in ``folder``, each hidden from other
        hosts than its own."""
        self.network = network
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.hosts = list(network.hosts.values())
        self.run_dir = Path()
        for host in self.hosts:
            (self.home(host) / "tmp").mkdir(parents=True, mode=0o700)
        for host in self.hosts:
            for other in self.hosts:
                if other is not host:
                    host.hide(self.home(other))
        self.password = secrets.token_hex(24)
        """Of the ledger's owner."""

    def home(self, host: Host) -> Path:
        """Return a host's own folder."""
        return self._folder / host.name

    @property
    def first(self) -> Host:
        """The run's host, which has the ledger's server as well."""
        return self.hosts[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            _end(process)

    # -- the run -----------------------------------------------------------------------------------

    def start_ledger(self) -> None:
        """Start the ledger's server on the first host; its password is in a file alone."""
        folder = self.home(self.first) / "ledger"
        folder.mkdir(mode=0o700)
        conf = folder / "ledger.conf"
        lines = (
            f"requirepass {self.password}", f"bind {self.first.address} 127.0.0.1", f"port {PORT}", f"dir {folder}",
            "maxmemory 512mb", "maxmemory-policy noeviction", "appendonly yes", "appendfsync everysec", "save ''",
        )  # fmt: skip
        conf.touch(mode=0o600)
        conf.write_text("\n".join(lines) + "\n")
        log = folder / "server.log"
        self._start(self.first, str(find_server().path), str(conf), output=log)
        self.until(lambda: b"Ready to accept connections" in log.read_bytes(), "the ledger's server", log)

    def up(self, files: Sequence[Path], overrides: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start the run; return its supervisor."""
        home = self.home(self.first)
        settings = (
            *overrides, f"run.dir={home / 'runs'}", "run.name=spread", "wire.transport=tcp", "wire.host=0.0.0.0",
            f"wire.advertise_host={self.first.address}", "ledger.allow_plaintext=true",
        )  # fmt: skip
        words = [word for setting in settings for word in ("--set", setting)]
        self.run_dir = home / "runs" / "spread"
        supervisor = self._start(
            self.first, *_HEADRACE, "up", *map(str, files), "--plain", *words, output=home / "up.out"
        )
        self.until(lambda: (self.run_dir / "config.toml").exists(), "the run's folder", home / "up.out")
        return supervisor

    def token(self, role: Role, host: Host) -> Path:
        """Make a token, and copy it to a host; return its path there."""
        made = self.home(self.first) / f"{role}.token"
        if not made.exists():
            self.headrace("fleet", "tokens", "create", str(self.run_dir), "--role", str(role), "--out", str(made))
        copied = self.home(host) / made.name
        # this machine sees all homes, as a person's own computer reaches all hosts
        shutil.copy2(made, copied)
        return copied

    def join(self, host: Host, role: Role, count: int = 1) -> subprocess.Popen[bytes]:
        """Let a host join as a role; its output is ``<role>.out`` in its home."""
        url = f"redis://{self.first.address}:{PORT}/0"
        words = (
            "fleet",
            "join",
            url,
            "--allow-plaintext",
            "--token",
            str(self.token(role, host)),
            "--count",
            str(count),
        )
        return self._start(host, *_HEADRACE, *words, output=self.home(host) / f"{role}.out")

    def headrace(self, *words: str, host: Host | None = None) -> str:
        """Run a command to its end, and return its output."""
        host = host or self.first
        done = subprocess.run(
            host.on(*_HEADRACE, *words, folder=ROOT), env=self._environment(host), capture_output=True, text=True,
            timeout=_COMMAND_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise DataError(f"`headrace {' '.join(words)}` ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def audit(self) -> dict[str, Any]:
        """Return the run's audit."""
        return json.loads(self.headrace("ledger", "audit", str(self.run_dir), "--json"))

    def kill(self, host: Host) -> int:
        """Kill all that runs on a host; return how many processes that were."""
        victims = host.processes()
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        return len(victims)

    def until(self, condition: Callable[[], Any], what: str, output: Path, *, limit_s: float = _COMMAND_S) -> None:
        """Wait for a condition. Raises DataError with the end of ``output``, at once when a command
        has failed."""
        deadline = time.monotonic() + limit_s
        while not condition():
            has_failed = any(process.poll() not in (None, 0, -9) for process in self._processes)
            if has_failed or time.monotonic() > deadline:
                outputs = [path for path in (output, *self._folder.glob("*/*.out")) if path.exists()]
                said = "\n".join(f"{path}:\n{path.read_text(errors='replace')[-4000:]}" for path in outputs)
                raise DataError(f"{what} did not come within {limit_s:g} s\n{said}")
            time.sleep(_POLL_S)

    # -- processes ---------------------------------------------------------------------------------

    def _environment(self, host: Host) -> Mapping[str, str]:
        """Return a host's environment: the password on the first host alone."""
        home = self.home(host)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
        first = {"REDIS_URL": f"redis://:{self.password}@{self.first.address}:{PORT}/0"} if host is self.first else {}
        return kept | first | {
            "HOME": str(home),
            "TMPDIR": str(home / "tmp"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HEADRACE_ADVERTISE_HOST": host.address,
        }  # fmt: skip

    def _start(self, host: Host, *command: str, output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            process = subprocess.Popen(
                host.on(*command, folder=ROOT), env=self._environment(host), stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process


_HEADRACE = (sys.executable, "-m", "pipeline.cli")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
