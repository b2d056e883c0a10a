"""``workers.standby RUN_DIR NAME ROOM ROLE ...``: a process that can become a worker at once.

*Consumes* published weights, and one order of the supervisor (``pipeline.process.standby_files``).
*Produces* a report once a second, and then the worker. *Waits for* the order. It ends with its
supervisor.

It has no incarnation, no lease, no mailbox and no heartbeat. These come with the order: then it
registers under the worker's name, which fences the one before."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config.load import read_resolved
from pipeline.config.schema import RunConfig
from pipeline.files import keep_private
from pipeline.ledger.address import read_ledger_url
from pipeline.process.descendants import WORKER_MARK, worker_mark
from pipeline.process.forking import show
from pipeline.process.standby_files import StandbyOrder, StandbyReport, take_order, write_report
from pipeline.runtime.prepared import PreparedParts
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.run_ledger import connect_worker
from pipeline.runtime.threads import limit_threads
from protocol import headrace
from protocol.errors import LedgerError, WeightsDamaged
from protocol.ids import Role
from workers import __main__ as worker

_LOOK_S = 0.05
_WEIGHTS_EVERY_S = 0.5
_REPORT_EVERY_S = 1.0
_PAGE_TABLE = Path("/proc/self/smaps_rollup")


def main() -> NoReturn:
    """Prepare, wait for the order, and be the worker."""
    run_dir, name, _, *roles = sys.argv[1:]
    keep_private()
    # Before any import of a numeric library.
    limit_threads(1)
    standby = StandbyProcess(Path(run_dir).absolute(), name, tuple(map(Role, roles)))
    standby.prepare()
    order = asyncio.run(standby.wait())
    if order is None:
        worker.finish(0)
    standby.become(order)


class StandbyProcess:
    """One standby, from its parts to its order."""

    def __init__(self, run_dir: Path, name: str, roles: tuple[Role, ...]) -> None:
        self._run_dir, self._name, self._roles = run_dir, name, roles
        self._began_s = time.monotonic()
        self._parent = os.getppid()
        self._config: RunConfig = read_resolved(run_dir)
        self._parts: dict[str, Any] = {}
        self._weights: Any = None
        self._is_tried = False
        self._prepared_s = 0.0
        self._num_reports = 0

    def prepare(self) -> None:
        """Import, and make the parts. Raises what making them raises."""
        from workers.preparation import prepare

        self._parts = prepare(self._config, self._roles)
        if "generation" in self._parts:
            from workers.generator.followed_weights import FollowedWeights

            self._weights = self._parts["weights"] = FollowedWeights(self._parts["generation"])

    async def wait(self) -> StandbyOrder | None:
        """Follow the weights until the order comes; None when the supervisor has ended."""
        url = read_ledger_url(self._run_dir)
        registry = RedisRegistry(connect_worker(self._config, self._run_dir, url, self._name), self._config.run.name)
        next_look_s = next_report_s = 0.0
        try:
            while os.getppid() == self._parent:
                if order := take_order(self._run_dir, self._name, os.getpid()):
                    return order
                now = time.monotonic()
                if now >= next_look_s:
                    next_look_s = now + _WEIGHTS_EVERY_S
                    await self._follow(registry)
                if now >= next_report_s:
                    next_report_s = now + _REPORT_EVERY_S
                    self._report()
                await asyncio.sleep(_LOOK_S)
        finally:
            await registry.aclose()
        return None

    async def _follow(self, registry: RedisRegistry) -> None:
        """Take the newest version, and try the engine with the first one. A version whose file was
        replaced while it was read is left out.

        Raises WeightsDamaged and EngineError: this process is of no use."""
        if self._weights is None:
            return
        from workers.preparation import try_generation

        try:
            newest = await registry.weights()
            if newest is None:
                return
            has_it = False
            try:
                has_it = self._weights.follow(newest)
            except WeightsDamaged:
                if newest == await registry.weights():
                    raise
        except LedgerError as error:
            sys.stdout.write(f"{self._name}: the weights are not read: {error}\n")
            return
        if has_it and not self._is_tried:
            try_generation(self._parts["generation"], self._config)
            self._is_tried = True

    def _report(self) -> None:
        serving = None if self._weights is None else self._weights.serving
        if not self._prepared_s:
            self._prepared_s = time.monotonic() - self._began_s
        self._num_reports += 1
        report = StandbyReport(
            pid=os.getpid(),
            turn=self._num_reports,
            roles=tuple(map(str, self._roles)),
            version=None if serving is None else serving[0].policy_version,
            memory_bytes=own_memory(),
            prepared_s=round(self._prepared_s, 3),
        )
        try:
            write_report(self._run_dir, self._name, report)
        except OSError as error:
            sys.stdout.write(f"{self._name}: not reported: {error}\n")

    def become(self, order: StandbyOrder) -> NoReturn:
        """Be the worker of an order, and end with its exit code."""
        from workers.preparation import give_threads

        role = Role(order.role)
        arguments = [str(role), "--run-dir", str(self._run_dir), "--name", order.worker]
        command = headrace.command("workers", *arguments)
        # Its descendants inherit the mark, and end with the worker.
        show(command, {**os.environ, WORKER_MARK: worker_mark(self._run_dir, order.worker)})
        sys.argv[:] = ["workers", *arguments]
        sys.stdout.flush()
        output = os.open(self._run_dir / "logs" / f"{order.worker}.out", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        give_threads(self._config, role)
        used = {"generation": Role.GENERATOR, "weights": Role.GENERATOR, "reference": Role.REFERENCE}
        used |= {"reward model": Role.REWARD, "value": Role.VALUE, "training": Role.LEARNER}
        parts = {name: part for name, part in self._parts.items() if used.get(name, role) is role}
        if self._weights is not None and role is not Role.GENERATOR:
            self._weights.reader.close()
        # The other roles' models go.
        self._parts, self._weights = {}, None
        worker.finish(worker.work(arguments, PreparedParts(self._config, parts)))


def own_memory() -> int:
    """Return the bytes of memory that this process shares with no other; 0 where that is not
    known."""
    try:
        lines = _PAGE_TABLE.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    private = (line.split() for line in lines if line.startswith("Private_"))
    return sum(int(fields[1]) for fields in private) << 10


if __name__ == "__main__":
    main()
