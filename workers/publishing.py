"""Publishing policy versions, and knowing who serves what.

*Consumes* the training backend's weights. *Produces* announced, digested versions. *Waits for* generators that lag too far
behind: a live generator that serves an older version than ``max_generator_lag`` allows is given ``ack_timeout_s`` to take the
new weights; then it is fenced, so that the supervisor replaces it and its trajectories go on elsewhere. So the version never
runs away from generators that have failed silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.runtime.actor import ActorContext
from pipeline.runtime.registry import Heartbeat, WaitingFor
from pipeline.weights import WeightsStore, weights_folder
from protocol.endpoints import mailbox_endpoint
from protocol.errors import UnknownMessage
from protocol.ids import Role
from workers.engines.build import take_probe, write_weights

if TYPE_CHECKING:
    from workers.engines.training import TrainingBackend

_POLL_S = 0.05
_SERVE_TIMEOUT_S = 0.5
_SILENT_AFTER_S = 5.0
"""A generator without a heartbeat for this long is the supervisor's business, not ours."""


class Publisher:
    """The learner's side of the weights."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        settings = ctx.config.weights
        folder = weights_folder(ctx.run_dir, shared_memory=settings.shared_memory)
        self._store = WeightsStore(folder, keep=settings.keep)
        self._endpoint = ""

    async def start(self) -> None:
        """Serve ranges of the files to other hosts when the links go over tcp; on one host files are mapped."""
        ctx = self._ctx
        if ctx.config.wire.transport != "tcp":
            return
        self._responder = ctx.transport.responder(mailbox_endpoint(ctx.config.wire, ctx.run_dir, ctx.who))
        self._endpoint = self._responder.endpoint
        await ctx.registry.set_endpoint(ctx.who, self._endpoint, public_key=ctx.transport.public_key)
        ctx.spawn("weights-server", self._serve())

    async def next_version(self, checkpointed: int) -> int:
        """Return the version to publish first. Versions only grow: what a learner begins with gets a new number, above all that
        were announced, whether or not the same weights were published before it. One number never names two files."""
        announced = await self._ctx.registry.weights()
        return checkpointed if announced is None else max(checkpointed, announced.policy_version + 1)

    async def publish(self, policy_version: int, backend: TrainingBackend) -> None:
        """Write, digest and announce the backend's weights as ``policy_version``."""
        await self._wait_for_laggards(policy_version)
        self._ctx.waiting_for(WaitingFor.COMPUTE)

        def write(path: Path) -> None:
            probe = take_probe(self._ctx.config, backend)
            write_weights(self._ctx.config, path, backend.tensors(), probe=probe)

        stored = await self._ctx.compute(self._store.publish, policy_version, write)
        await self._ctx.registry.announce_weights(
            self._ctx.who, self._store.announcement(stored, endpoint=self._endpoint)
        )

    def close(self) -> None:
        """Stop serving; the files stay for generators that are mapping them."""
        if self._endpoint:
            self._responder.close()

    async def _serve(self) -> None:
        while True:
            try:
                await self._responder.serve_one(self._store.answer, timeout_s=_SERVE_TIMEOUT_S)
            except UnknownMessage as error:  # a peer's mistake is never the learner's end
                self._ctx.log.warning("weights_request_refused", reason=str(error))

    async def _wait_for_laggards(self, policy_version: int) -> None:
        ctx = self._ctx
        oldest_allowed = policy_version - ctx.config.weights.max_generator_lag
        deadline = ctx.clock.monotonic() + ctx.config.weights.ack_timeout_s
        while laggards := [
            beat
            for beat in await ctx.registry.heartbeats()
            if _lags(beat, oldest_allowed, ctx.clock.time()) and not ctx.draining.is_set()
        ]:
            names = ", ".join(f"{beat.who.worker} (version {beat.policy_version})" for beat in laggards)
            if ctx.clock.monotonic() >= deadline:
                ctx.log.error("generators_fenced", generators=names, oldest_allowed=oldest_allowed)
                for beat in laggards:
                    await ctx.registry.fence(beat.who.worker)
                return
            ctx.waiting_for(WaitingFor.WEIGHTS, f"{names} to take version {policy_version - 1}")
            await ctx.clock.sleep(_POLL_S)


def _lags(beat: Heartbeat, oldest_allowed: int, now_s: float) -> bool:
    is_live = now_s - beat.at_s < _SILENT_AFTER_S and beat.waiting_for is not WaitingFor.DRAINING
    return beat.who.role is Role.GENERATOR and is_live and 0 <= beat.policy_version < oldest_allowed
