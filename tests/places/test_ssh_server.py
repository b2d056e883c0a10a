"""Claims about the launcher of hosts with the system's ssh client and a real server on loopback.

They need an environment with asyncssh: ``make test-places``.

A host is a user of the server, whose home is a folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.operations import SshSection
from pipeline.supervisor.launchers.hosts import SshLauncher
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.supervisor.launchers.contract import FarLauncherContract, until
from tests.pipeline.supervisor.launchers.place_tools import assert_no_secret_but_in_a_private_file, join_command
from tests.pipeline.supervisor.launchers.test_ssh import HOSTS, SshPlace

asyncssh = pytest.importorskip("asyncssh", reason="make test-places installs it")
pytestmark = pytest.mark.filterwarnings("default")


class Server:
    """An ssh server that runs commands by a shell, in the home of the user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key, self.host_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        (folder / "id").write_bytes(self.key.export_private_key())
        (folder / "id").chmod(0o600)
        self.commands: list[str] = []
        self.environments: list[dict[str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._started.wait(20.0)
        self.write_config()

    def write_config(self) -> None:
        known = self.folder / "known_hosts"
        public = self.host_key.export_public_key().decode().strip()
        known.write_text(f"[127.0.0.1]:{self.port} {public}\n")
        lines = [
            f"Host {host}\n HostName 127.0.0.1\n Port {self.port}\n User {host}\n IdentityFile {self.folder / 'id'}\n"
            f" IdentitiesOnly yes\n UserKnownHostsFile {known}\n StrictHostKeyChecking yes\n"
            for host in HOSTS
        ]
        (self.folder / "config").write_text("".join(lines))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._started.set()
        self._loop.run_forever()
        self._acceptor.close()
        self._loop.run_until_complete(self._acceptor.wait_closed())
        self._loop.close()

    async def _listen(self) -> None:
        permitted = asyncssh.import_authorized_keys(self.key.export_public_key().decode())
        self._acceptor = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[self.host_key],
            authorized_client_keys=permitted,
            process_factory=self._run,
            encoding=None,
        )
        self.port = self._acceptor.get_port()

    async def _run(self, process: Any) -> None:
        home = self.folder / "hosts" / process.get_extra_info("username")
        self.commands.append(process.command)
        self.environments.append({str(name): str(value) for name, value in process.env.items()})
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        given = await process.stdin.read()
        child = await asyncio.create_subprocess_shell(
            process.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=home,
            env=environment,
        )
        output, error = await child.communicate(given)
        process.stdout.write(output)
        process.stderr.write(error)
        process.exit(child.returncode)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20.0)


class ServedPlace(SshPlace):
    """Two users of a server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        assert shutil.which("ssh"), "these tests need an ssh client"
        self.server = Server(folder)
        options = ("-F", str(folder / "config"))
        self.settings = self.settings.model_copy(update={"ssh": SshSection(hosts=HOSTS, options=options)})

    def close(self) -> None:
        super().close()
        self.server.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[ServedPlace]:
    found = ServedPlace(tmp_path)
    yield found
    found.close()


class TestSshServer(FarLauncherContract):
    """The contract, over real connections."""


def test_a_secret_goes_over_the_connection_alone(place: ServedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:ledger-password@127.0.0.1:1/0")
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until(lambda: "begun" in launcher.logs("generator-0"))
    assert_no_secret_but_in_a_private_file(place.folder, "generator-0")
    assert {command.split()[-1] for command in place.server.commands} == {"place"}
    assert not any("ledger-password" in str(environment) for environment in place.server.environments)


def test_a_host_with_another_key_is_refused_and_named(place: ServedPlace) -> None:
    place.launcher().reach()
    place.server.host_key = asyncssh.generate_private_key("ssh-ed25519")
    place.server.write_config()
    with pytest.raises(ConfigError, match=r"2 of 2 hosts .* one: ssh to one failed: .*Host key verification failed"):
        SshLauncher(place.settings, join_command(place.folder)).reach()
