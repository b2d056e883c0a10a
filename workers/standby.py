"""``workers.standby RUN_DIR NAME ROOM ROLE ...``: a process that can become a worker at once.

It prepares a worker's parts, keeps them at the newest published weights, reports once a second, and
waits for one order of the supervisor (``pipeline.process.records``), on which it becomes the
worker. It ends with its supervisor.

One TaskGroup holds two tasks. One polls for the order and reports; the other has a thread make the
parts, and then load each version of the weights. So a long load delays neither. An order is
accepted at once, but obeyed only when the load in progress has ended, since an engine cannot be
left half loaded.

It has no incarnation, lease, mailbox or heartbeat. These come with the order: it then registers
under the worker's name, which fences the previous one."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.config.load import read_resolved
from pipeline.config.schema import RunConfig
from pipeline.files import keep_private
from pipeline.ledger.address import read_ledger_url
from pipeline.process.descendants import WORKER_MARK, end_marked, worker_mark
from pipeline.process.forking import show
from pipeline.process.records import StandbyOrder, StandbyReport, take_order, write_report
from pipeline.process.work import Meter, listening
from pipeline.runtime.prepared import PreparedParts
from pipeline.runtime.process_setup import limit_threads
from pipeline.runtime.registry.contract import Registry, WeightsAnnouncement
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.worker_start import connect_worker
from protocol import headrace
from protocol.errors import LedgerError, WeightsDamaged
from protocol.ids import Role
from workers import __main__ as worker

if TYPE_CHECKING:
    from workers.generator.followed_weights import FollowedWeights

_LOOK_S = 0.05
_WEIGHTS_EVERY_S = 0.5
_REPORT_EVERY_S = 1.0
_PAGE_TABLE = Path("/proc/self/smaps_rollup")
_ROLES = {
    "generation": Role.GENERATOR, "weights": Role.GENERATOR, "reference": Role.REFERENCE,
    "reward model": Role.REWARD, "value": Role.VALUE, "training": Role.LEARNER,
}  # fmt: skip
"""The only role that uses a part, by the part's name; other parts serve several roles."""


def main() -> NoReturn:
    """Prepare, wait for the order, and become the worker."""
    run_dir, name, _, *roles = sys.argv[1:]
    keep_private()
    # Before any import of a numeric library.
    limit_threads(1)
    standby = StandbyProcess(Path(run_dir).absolute(), name, tuple(map(Role, roles)))
    standby.become(asyncio.run(standby.wait()))


class StandbyProcess:
    def __init__(self, run_dir: Path, name: str, roles: tuple[Role, ...]) -> None:
        self._run_dir, self._name, self._roles = run_dir, name, roles
        self._began_s = time.monotonic()
        self._parent = os.getppid()
        self._config: RunConfig = read_resolved(run_dir)
        self._meter = Meter()
        self._parts: dict[str, Any] = {}
        self._weights: FollowedWeights | None = None
        self._prepared_s = 0.0
        """0 until all parts are made."""
        self._is_tried = self._is_taking = False
        self._num_reports = 0
        self._is_ordered = asyncio.Event()

    async def wait(self) -> StandbyOrder:
        """Make the parts and follow the weights until the order arrives or the supervisor ends."""
        url = read_ledger_url(self._run_dir)
        client = connect_worker(self._config, self._run_dir, url, self._name)
        registry = RedisRegistry(client, self._config.run.name)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._get_ready(registry), name="parts and weights")
                order = await self._look()
                self._is_ordered.set()
        finally:
            await registry.aclose()
        return order

    async def _look(self) -> StandbyOrder:
        next_report_s = 0.0
        while True:
            if os.getppid() != self._parent:
                self._end()
            if order := take_order(self._run_dir, self._name, os.getpid()):
                return order
            if time.monotonic() >= next_report_s:
                self._report()
                next_report_s = time.monotonic() + _REPORT_EVERY_S
            await asyncio.sleep(_LOOK_S)

    def _end(self) -> NoReturn:
        """End this process and its children, without waiting for a load in progress."""
        if mark := os.environ.get(WORKER_MARK):
            end_marked(WORKER_MARK, mark)
        worker.finish(0)

    async def _get_ready(self, registry: Registry) -> None:
        with listening(self._meter):
            await asyncio.to_thread(self._make_parts)
            while self._weights is not None and not self._is_ordered.is_set():
                await self._follow(registry, self._weights)
                self._meter.step()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.0 if self._is_taking else _WEIGHTS_EVERY_S):
                        await self._is_ordered.wait()

    def _make_parts(self) -> None:
        from workers.preparation import import_all, prepare

        import_all(self._config, self._roles)
        # so that later collections only look at the parts
        gc.freeze()
        self._meter.step()
        self._parts = prepare(self._config, self._roles)
        if "generation" in self._parts:
            from workers.generator.followed_weights import FollowedWeights

            self._weights = self._parts["weights"] = FollowedWeights(self._parts["generation"])
        self._prepared_s = time.monotonic() - self._began_s

    async def _follow(self, registry: Registry, weights: FollowedWeights) -> None:
        """Load the newest version, and try the engine with the first one.

        Raises WeightsDamaged and EngineError, after which this process is useless."""
        try:
            newest = await registry.weights()
            if newest is None:
                return
            self._is_taking = newest.policy_version > weights.policy_version
            try:
                self._is_taking &= await asyncio.to_thread(self._take, weights, newest)
            except WeightsDamaged:
                if newest == await registry.weights():
                    raise
        except LedgerError as error:
            self._is_taking = False
            sys.stdout.write(f"{self._name}: the weights are not read: {error}\n")

    def _take(self, weights: FollowedWeights, newest: WeightsAnnouncement) -> bool:
        from workers.preparation import try_generation

        has_it = weights.follow(newest)
        if has_it and not self._is_tried:
            try_generation(self._parts["generation"], self._config)
            self._is_tried = True
        return has_it

    def _report(self) -> None:
        serving = None if self._weights is None else self._weights.serving
        self._num_reports += 1
        report = StandbyReport(
            pid=os.getpid(),
            turn=self._num_reports,
            roles=tuple(map(str, self._roles)) if self._prepared_s else (),
            version=serving[0].policy_version if serving is not None and self._is_tried else None,
            memory_bytes=own_memory(),
            prepared_s=round(self._prepared_s, 3),
            progress=self._meter.report().steps,
            is_taking=self._is_taking,
        )
        try:
            write_report(self._run_dir, self._name, report)
        except OSError as error:
            sys.stdout.write(f"{self._name}: not reported: {error}\n")

    def become(self, order: StandbyOrder) -> NoReturn:
        from workers.preparation import give_threads

        role = Role(order.role)
        arguments = [str(role), "--run-dir", str(self._run_dir), "--name", order.worker]
        command = headrace.command("workers", *arguments)
        # Its descendants inherit the mark, and are ended with the worker.
        show(command, {**os.environ, WORKER_MARK: worker_mark(self._run_dir, order.worker)})
        sys.argv[:] = ["workers", *arguments]
        sys.stdout.flush()
        output = os.open(self._run_dir / "logs" / f"{order.worker}.out", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        give_threads(self._config, role)
        worker.finish(worker.work(arguments, self._parts_for(role)))

    def _parts_for(self, role: Role) -> PreparedParts:
        """Return the parts for a worker of this role, and free the others."""
        own = {name: part for name, part in self._parts.items() if _ROLES.get(name, role) is role}
        others = PreparedParts(parts={name: part for name, part in self._parts.items() if name not in own})
        self._parts, self._weights = {}, None
        others.release()
        return PreparedParts(self._config, own)


def own_memory() -> int:
    """Return the bytes of memory that this process shares with no other; 0 if unknown."""
    try:
        lines = _PAGE_TABLE.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    private = (line.split() for line in lines if line.startswith("Private_"))
    return sum(int(fields[1]) for fields in private) << 10


if __name__ == "__main__":
    main()
