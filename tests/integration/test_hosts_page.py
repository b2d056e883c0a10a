"""Claims about the how-tos on several hosts and ledger servers: followed as written, over a cable between
two hosts.

Its commands are taken from the page and run by bash, those of the ledger's server before them. The
hosts are namespaces. Each knows its own name as a loopback address, as on Debian, and its
neighbour's by the cable's address. Host B sees nothing of the folder with the run, the data, the
model and the ledger. It has its own shared memory, and the tokens that were copied. The server's
program, which tests use, has no TLS: its end of the encrypted connection is a relay with the page's
certificate."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ops.emulated.journal import read_journal
from ops.hosts.namespaces import Host, SpaceRefused, host_network
from pipeline.config.load import load_config, resolve_paths, to_toml
from pipeline.ledger.server.binary import find_server
from pipeline.training.update_log.folder import UPDATES_FOLDER, read_log
from protocol.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "ops" / "docs" / "how-to"
RUN = "far"
_WAIT_S = 90.0
RELAY = """
import asyncio, ssl

async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def relay(reader, writer):
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", 6379)
    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

async def main():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("server.pem", "server.key")
    async with await asyncio.start_server(relay, "0.0.0.0", 6380, ssl=context) as server:
        print("ready", flush=True)
        await server.serve_forever()

asyncio.run(main())
"""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]


def blocks(name: str) -> list[str]:
    """Return the commands of a page."""
    return re.findall(r"```(?:sh)?\n(.*?)```", (PAGES / name).read_text(), re.DOTALL)


@contextmanager
def network(hidden: Path) -> Iterator[tuple[Host, Host]]:
    """Make two hosts; a folder is each one's own."""
    try:
        with host_network("host-a", "host-b", hidden=[hidden], versions=[4]) as made:
            yield made["host-a"], made["host-b"]
    except SpaceRefused as error:
        pytest.skip(str(error))


def until(condition: Callable[[], Any], what: str, output: Path) -> Any:
    deadline = time.monotonic() + _WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come:\n{output.read_text()[-4000:]}"
        time.sleep(0.2)
    return value


@contextmanager
def running(
    host: Host, script: str, folder: Path, output: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script by bash on a host; end all of it at last."""
    command = host.on("bash", "-euo", "pipefail", "-c", script, folder=folder)
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + patience_s
            try:
                os.killpg(process.pid, number)
                while time.monotonic() < deadline:
                    process.poll()
                    os.killpg(process.pid, 0)
                    time.sleep(0.05)
            except ProcessLookupError:
                break
        process.wait()


def write_run(shared: Path) -> None:
    """Write the page's ``run.toml``: an emulated run of the drill's kind, longer than the test."""
    rows = [
        {
            "prompt": f"{n}+1=",
            "answer": str(n + 1),
            "verifier": "ops.drill.verifier:judge",
            "switch": str(shared / "none"),
        }
        for n in range(512)
    ]
    shutil.copytree(ROOT / "ops" / "demo" / "tiny_model", shared / "model")
    (shared / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"run.dir={shared / 'runs'}", f"run.name={RUN}", "run.num_updates=10000", f"data.train=['{shared / 'train.jsonl'}']",
        f"model.path={shared / 'model'}",
        "engines.settings.journal=journals", "fleet.generator=1", "fleet.reward=1", "fleet.reference=1",
    )  # fmt: skip
    (shared / "run.toml").write_text(to_toml(resolve_paths(load_config([ROOT / "configs" / "drill.toml"], settings))))


def trained(run_dir: Path) -> set[str]:
    """Return the trajectories in all updates of the log."""
    try:
        segments = read_log(run_dir / UPDATES_FOLDER)
    except DataError:
        # there is no log yet
        return set()
    whole = [update for segment in segments for update in segment.updates if update.outcome is not None]
    units = [unit for update in whole for unit in update.units()]
    return {str(scored.chunk.trajectory) for unit in units for chunks in unit.trajectories for scored in chunks}


def far_worker(logs: Path, role: str) -> list[dict[str, Any]]:
    """Return the log of the worker that joined from host B; an empty one before it did."""
    found = list(logs.glob(f"{role}-hostb-*.jsonl"))
    lines = found[0].read_text().splitlines() if found else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def mailboxes(logs: Path) -> set[str]:
    """Return the addresses of hosts to whose scorers host B's generator has a link."""
    opened = [line["endpoint"] for line in far_worker(logs, "generator") if line["event"] == "link_opened"]
    return {endpoint.partition("//")[2].partition(":")[0] for endpoint in opened}


def sampled(joined: Path) -> set[str]:
    """Return the trajectories of which a joined generator sampled something."""
    journals = (joined / "generator-host-b" / RUN / "journals").glob("*.journal")
    return {str(name) for path in journals for name, _, _ in read_journal(path)}


@pytest.mark.long
def test_the_pages_commands_let_another_hosts_workers_do_a_runs_work_until_it_ends(tmp_path: Path) -> None:
    home, programs, far = tmp_path / "home", tmp_path / "programs", tmp_path / "far"
    for folder in (home, programs, far):
        folder.mkdir(mode=0o700)
    write_run(home)
    (programs / "redis-server").symlink_to(os.environ.get("HEADRACE_TEST_SERVER") or find_server().path)
    (tmp_path / "relay.py").write_text(RELAY)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("REDIS", "HEADRACE"))} | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        # of the verifier, which is no part of what is installed
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "LEDGER_HOST": "host-a",
    }
    on_far = environment | {"XDG_CACHE_HOME": str(far / "cache"), "XDG_STATE_HOME": str(far / "state")}
    server, certificate, use = blocks("ledger-server.md")
    [commands] = blocks("several-hosts.md")
    on_a, _, rest = commands.partition("# in another terminal")
    tokens, _, on_b = rest.partition("# on another host")
    tokens, on_b = (part.partition("\n")[2].replace("runs/NAME", f"runs/{RUN}") for part in (tokens, on_b))
    assert on_a.count("headrace up") == 1, on_a
    assert [line.split()[1:3] for line in on_b.splitlines()] == [["fleet", "join"]] * 2, on_b
    outputs = {name: tmp_path / f"{name}.out" for name in ("ledger", "a", "tokens", "b", "down")}
    run_dir, joined = home / "runs" / RUN, far / "state" / "headrace" / "joined"
    logs = {role: joined / f"{role}-host-b" / RUN / "logs" for role in ("generator", "reward")}
    with network(home) as (a, b):
        addresses = [a.address, b.address]
        a.knows({"host-a": "127.0.1.1", "host-b": b.address}, tmp_path / "hosts-a")
        b.knows({"host-b": "127.0.1.1", "host-a": a.address}, tmp_path / "hosts-b")
        assert b.run("ls", str(home)) == "", "host B sees nothing of the run's host"

        begin = server[: server.index("export REDIS_URL")] + certificate + f"exec {sys.executable} ../relay.py\n"
        with running(a, begin, home, outputs["ledger"], environment):
            until(lambda: "ready" in outputs["ledger"].read_text(), "the ledger's server", outputs["ledger"])
            with running(a, use + on_a, home, outputs["a"], environment) as supervisor:
                until(lambda: (run_dir / "ledger.json").exists() and (run_dir / "config.toml").exists(), "the run's folder",
                      outputs["a"])  # fmt: skip
                with running(a, tokens, home, outputs["tokens"], environment) as creating:
                    assert creating.wait(_WAIT_S) == 0, outputs["tokens"].read_text()
                for role in logs:
                    subprocess.run(
                        b.on("install", "-m", "600", "/dev/stdin", str(far / f"{role}.token")),
                        input=(home / f"{role}.token").read_bytes(), check=True, timeout=10,
                    )  # fmt: skip
                script = "".join(
                    f"{line} &\n{name}=$!\n" for name, line in zip(("one", "two"), on_b.splitlines(), strict=True)
                )
                script += (
                    # by process: bash forgets a job that ends while it waits for another
                    "wait $one\nwait $two\n"
                )
                with running(b, script, far, outputs["b"], on_far) as workers:
                    until(
                        lambda: trained(run_dir) & sampled(joined), "an update with what host B sampled", outputs["b"]
                    )
                    until(
                        lambda: mailboxes(logs["generator"]) == set(addresses), "links to scorers on both hosts",
                        outputs["b"],
                    )  # fmt: skip
                    seen = len(trained(run_dir))
                    until(
                        lambda: len(trained(run_dir)) >= seen + 64, "more updates, with what both scored", outputs["a"]
                    )
                    until(
                        lambda: far_worker(run_dir / "logs", "reward"),
                        "host B's logs in the run's folder",
                        outputs["b"],
                    )
                    down = f"headrace down {run_dir}; headrace ledger audit {run_dir} --json\n"
                    with running(a, down, home, outputs["down"], environment) as ending:
                        assert ending.wait(_WAIT_S) == 0, outputs["down"].read_text()
                    assert supervisor.wait(_WAIT_S) == 0, outputs["a"].read_text()
                    assert workers.wait(_WAIT_S) == 0, outputs["b"].read_text()
    audit = json.loads(outputs["down"].read_text()[outputs["down"].read_text().index("{") :])
    assert audit["balances"] is True
    last = far_worker(logs["generator"], "generator")[-1]
    assert last["event"] == "worker_ended"
    assert last["counters"]["weight_swaps"] >= 1, "over the wire: the learner's shared memory is not there"
    scored = far_worker(logs["reward"], "reward")[-1]
    assert scored["event"] == "worker_ended", scored
    assert scored["counters"]["scored"] > 0, scored
