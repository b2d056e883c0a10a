"""A real Ray cluster of several nodes on loopback, with token authentication."""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray installs it")

OBJECTS_BYTES = 80 << 20
LOOPBACK = {
    # Without it, Ray takes 127.0.0.1 for the host's outgoing address, and then listens everywhere.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
LEAN = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 4,
    "agent_register_timeout_ms": 120_000,
    "prestart_worker_first_driver": False,
}
PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]


class RayCluster:
    """Nodes of one cluster. The environment of this process is theirs, and that of drivers."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, has_auth: bool = True) -> None:
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(24)} if has_auth else {}
        own = {"XDG_STATE_HOME": str(self.state), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        patch.delenv("RAY_AUTH_MODE", raising=False)
        for name, value in {**LOOPBACK, **own, **auth}.items():
            patch.setenv(name, value)
        from ray._raylet import Config  # pyright: ignore[reportMissingImports]
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        Config.initialize("")
        head = {"num_cpus": 4, "_system_config": LEAN, "no_monitor": True, **_args()}
        with _one_start_at_a_time():
            self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address

    def add_node(self, **arguments: Any) -> Any:
        """Add a node; ``labels``, ``resources``, ``num_cpus``."""
        with _one_start_at_a_time():
            return self._cluster.add_node(**{"num_cpus": 4, **_args(), **arguments})

    def kill_node(self, node: Any) -> None:
        """Kill a node's raylet and all of its processes; return when the head knows."""
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.wait_for_nodes(PATIENCE_S)

    @property
    def accessor(self) -> Any:
        """Ray's own tables, as the head holds them."""
        return self._cluster.global_state._connect_and_get_accessor()

    @property
    def session(self) -> Path:
        """Folder of Ray's logs."""
        return Path(self._cluster.head_node.get_session_dir_path())

    def groups(self, namespace: str) -> list[str]:
        """Return the states of a namespace's placement groups."""
        from ray.core.generated import gcs_pb2  # pyright: ignore[reportMissingImports]

        rows = [gcs_pb2.PlacementGroupTableData.FromString(row) for row in self.accessor.get_placement_group_table()]
        names = gcs_pb2.PlacementGroupTableData.PlacementGroupState.Name
        return [names(row.state) for row in rows if row.ray_namespace == namespace]

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@contextmanager
def open_cluster(folder: Path) -> Iterator[str]:
    """Run a cluster without authentication; yield its address.

    It has a process of its own: Ray reads the mode once for a process, and then uses it for all
    clusters."""
    address = folder / "address"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ray.cluster", str(folder)], cwd=ROOT, stdin=subprocess.PIPE, env=environment
    )
    assert process.stdin is not None
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not address.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield address.read_text()
    finally:
        process.stdin.close()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()


@contextmanager
def _one_start_at_a_time() -> Iterator[None]:
    """Start no other node of these tests meanwhile.

    A raylet aborts when its agents, two programs with slow imports, take more than 15 s."""
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _args() -> dict[str, Any]:
    return {
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
        "include_log_monitor": False,
        "object_store_memory": OBJECTS_BYTES,
    }


def _serve_open(folder: Path) -> None:
    """Run a cluster without authentication until standard input ends."""
    with pytest.MonkeyPatch.context() as patch:
        cluster = RayCluster(folder, patch, has_auth=False)
        try:
            partial = folder / ".address"
            partial.write_text(cluster.address)
            partial.rename(folder / "address")
            sys.stdin.read()
        finally:
            cluster.close()


if __name__ == "__main__":
    _serve_open(Path(sys.argv[1]))
