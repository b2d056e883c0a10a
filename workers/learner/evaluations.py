"""Evaluations as the learner keeps them: requested, collected and recorded, one EvaluationRow each.

Generators and the reward worker have a deadline. An evaluation that is incomplete by then is
recorded with the responses that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.ledger.types import EvaluationRequest, EvaluationState
from pipeline.observability.history import EvaluationRow
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.registry.contract import WaitingFor

_POLL_S = 0.1


@dataclass(slots=True)
class _Pending:
    number: int
    policy_version: int
    deadline_s: float


class Evaluations:
    """Requests evaluations one after another and collects them."""

    def __init__(
        self, ctx: ActorContext, record: Callable[[EvaluationRow], None], *, num_prompts: int, next_number: int = 0
    ) -> None:
        """Record rows with ``record``, in the same step in which they are no longer pending."""
        self._ctx = ctx
        self._record = record
        self._num_prompts = min(num_prompts, ctx.config.evaluation.num_prompts)
        self.next_number = next_number
        self._pending: list[_Pending] = []

    @property
    def pending(self) -> tuple[tuple[int, int], ...]:
        """Number and policy version of those that are not recorded yet, for a checkpoint."""
        return tuple((one.number, one.policy_version) for one in self._pending)

    async def resume(self, pending: Iterable[tuple[int, int]]) -> None:
        """Go on collecting the evaluations that were pending at a checkpoint. Later numbers are
        skipped: their responses belong to weights that were given up."""
        deadline_s = self._ctx.clock.monotonic() + self._ctx.config.evaluation.timeout_s
        self._pending += [_Pending(number, version, deadline_s) for number, version in pending]
        while await self._ctx.ledger.evaluation(self.next_number) is not None:
            self.next_number += 1

    @property
    def is_enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self._num_prompts > 0

    async def request(self, policy_version: int) -> None:
        """Open an evaluation of ``policy_version``."""
        settings = self._ctx.config.evaluation
        request = EvaluationRequest(
            number=self.next_number,
            policy_version=policy_version,
            num_prompts=self._num_prompts,
            samples_per_prompt=settings.samples_per_prompt,
            temperature=settings.temperature,
            top_p=settings.top_p,
        )
        await self._ctx.ledger.request_evaluation(self._ctx.who, request)
        deadline_s = self._ctx.clock.monotonic() + settings.timeout_s
        self._pending.append(_Pending(self.next_number, policy_version, deadline_s))
        self.next_number += 1

    async def collect(self) -> None:
        """Record the evaluations that are complete by now, or past their deadline."""
        for pending in list(self._pending):
            state = await self._ctx.ledger.evaluation(pending.number)
            is_late = self._ctx.clock.monotonic() >= pending.deadline_s
            if not (is_late or (state is not None and state.is_complete)):
                continue
            self._pending.remove(pending)
            if state is None or not state.is_complete:
                num_responses = len(state.samples) if state is not None else 0
                self._ctx.log.warning("evaluation_incomplete", number=pending.number, num_responses=num_responses)
            if state is not None and state.samples:
                self._record(_row(pending, state, at_s=self._ctx.clock.time()))

    async def wait(self) -> None:
        """Record each requested one, complete or at its deadline, until the worker drains."""
        while self._pending and not self._ctx.draining.is_set():
            self._ctx.waiting_for(WaitingFor.INPUT, f"evaluation {self._pending[0].number}")
            await self.collect()
            if self._pending:
                await self._ctx.clock.sleep(_POLL_S)


def _row(pending: _Pending, state: EvaluationState, *, at_s: float) -> EvaluationRow:
    samples = state.samples
    return EvaluationRow(
        number=pending.number,
        policy_version=pending.policy_version,
        at_s=at_s,
        num_responses=len(samples),
        num_failed=state.num_failed,
        accuracy=sum(s.accuracy for s in samples) / len(samples),
        response_length=sum(s.num_tokens for s in samples) / len(samples),
        oldest_version=min(s.oldest_version for s in samples),
        newest_version=max(s.newest_version for s in samples),
    )
