"""Requests and collects the run's evaluations, and records an EvaluationRow for each.

An evaluation that is incomplete at its deadline is recorded with the responses it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.data_sets import EvaluationSection
from pipeline.data.source import HeldOutSource
from pipeline.ledger.types import EvaluationRequest, EvaluationState
from pipeline.observability.estimates import average, pass_at
from pipeline.observability.history import EvaluationRow
from pipeline.observability.prompt_accuracies import PromptAccuracies, of_prompts, prompt_accuracies
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.registry.contract import WaitingFor

_POLL_S = 0.1


@dataclass(slots=True)
class _Pending:
    number: int
    policy_version: int
    deadline_s: float


class Evaluations:
    def __init__(
        self,
        ctx: ActorContext,
        record: Callable[[EvaluationRow], None],
        *,
        sets: Sequence[HeldOutSource],
        next_number: int = 0,
    ) -> None:
        """``record`` is called as soon as an evaluation is no longer pending."""
        self._ctx = ctx
        self._record = record
        evaluation = ctx.config.evaluation
        own = {one.name: evaluation.of_set(one) for one in evaluation.sets}
        self._sets = {one.name: (one, own.get(one.name, evaluation)) for one in sets if one.num_prompts}
        self._main = evaluation.main if evaluation.main is not None else next(iter(self._sets), "")
        self.next_number = next_number
        self._pending: list[_Pending] = []
        self._last_version: int | None = None
        self._is_refused = False

    @property
    def pending(self) -> tuple[tuple[int, int], ...]:
        """Number and policy version of the evaluations not recorded yet, for a checkpoint."""
        return tuple((one.number, one.policy_version) for one in self._pending)

    async def resume(self, pending: Iterable[tuple[int, int]]) -> None:
        """Continue to collect the evaluations that were pending at a checkpoint.

        Later numbers are skipped: their responses belong to weights that were discarded."""
        deadline_s = self._ctx.clock.monotonic() + self._ctx.config.evaluation.timeout_s
        self._pending += [_Pending(number, version, deadline_s) for number, version in pending]
        while await self._ctx.ledger.evaluation(self.next_number) is not None:
            self.next_number += 1

    @property
    def is_enabled(self) -> bool:
        return bool(self._sets)

    async def request(self, policy_version: int) -> None:
        """Open an evaluation of ``policy_version`` on each set, unless it was evaluated last."""
        if policy_version == self._last_version:
            return
        self._last_version = policy_version
        generation = self._ctx.config.generation
        for held_out, settings in self._sets.values():
            request = EvaluationRequest(
                number=self.next_number,
                policy_version=policy_version,
                num_prompts=min(held_out.num_prompts, settings.num_prompts),
                samples_per_prompt=settings.samples_per_prompt,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p,
                repetition_penalty=settings.repetition_penalty,
                presence_penalty=settings.presence_penalty,
                frequency_penalty=settings.frequency_penalty,
                stop_strings=generation.stop_strings if settings.stop_strings is None else settings.stop_strings,
                max_response_tokens=settings.max_response_tokens,
                first_prompt=held_out.first,
                set=held_out.name,
            )
            await self._ctx.ledger.request_evaluation(self._ctx.who, request)
            deadline_s = self._ctx.clock.monotonic() + settings.timeout_s
            self._pending.append(_Pending(self.next_number, policy_version, deadline_s))
            self.next_number += 1

    async def collect(self) -> None:
        for pending in list(self._pending):
            state = await self._ctx.ledger.evaluation(pending.number)
            is_late = self._ctx.clock.monotonic() >= pending.deadline_s
            if not (is_late or (state is not None and state.is_complete)):
                continue
            self._pending.remove(pending)
            if state is None or not state.is_complete:
                num_responses = len(state.samples) if state is not None else 0
                self._ctx.log.warning("evaluation_incomplete", number=pending.number, num_responses=num_responses)
            if state is not None and state.num_failed:
                self._ctx.log.warning(
                    "evaluation_left_out",
                    number=pending.number,
                    num_left_out=state.num_failed,
                    num_responses=len(state.samples),
                    action="they got no verdict, and are not in the accuracy; see `headrace ledger dead-letters list`",
                )
            if state is not None and state.samples:
                self._record(self._row(pending, state))

    async def wait(self) -> None:
        while self._pending and not self._ctx.draining.is_set():
            pending = self._pending[0]
            state = await self._ctx.ledger.evaluation(pending.number)
            size = 0.0 if state is None else float(state.request.num_prompts * state.request.samples_per_prompt)
            with self._ctx.work.task("evaluation", size, "responses"):
                await self._until_recorded(pending, size)

    async def _until_recorded(self, pending: _Pending, size: float) -> None:
        num_seen = 0
        while pending in self._pending and not self._ctx.draining.is_set():
            self._ctx.waiting_for(WaitingFor.INPUT, f"evaluation {pending.number}")
            await self.collect()
            if pending not in self._pending:
                return
            state = await self._ctx.ledger.evaluation(pending.number)
            num_done = 0 if state is None else len(state.samples) + state.num_failed
            if size and num_done > num_seen:
                self._ctx.work.step((num_done - num_seen) / size)
                num_seen = num_done
            await self._ctx.clock.sleep(_POLL_S)

    def _row(self, pending: _Pending, state: EvaluationState) -> EvaluationRow:
        samples, request = state.samples, state.request
        by_prompt: dict[int, list[float]] = {}
        for sample in samples:
            by_prompt.setdefault(sample.prompt, []).append(sample.accuracy)
        self._keep(pending, request, by_prompt)
        of_all = average(by_prompt)
        k = self._settings(request.set).pass_at or request.samples_per_prompt
        passed = pass_at(by_prompt, k) if request.samples_per_prompt > 1 else None
        return EvaluationRow(
            number=pending.number,
            policy_version=pending.policy_version,
            at_s=self._ctx.clock.time(),
            num_responses=len(samples),
            num_failed=state.num_failed,
            accuracy=of_all.value,
            response_length=sum(s.num_tokens for s in samples) / len(samples),
            oldest_version=min(s.oldest_version for s in samples),
            newest_version=max(s.newest_version for s in samples),
            set=request.set,
            is_main=request.set == self._main,
            low=of_all.low,
            high=of_all.high,
            pass_k=k,
            pass_at_k=passed and passed.value,
            pass_low=passed and passed.low,
            pass_high=passed and passed.high,
        )

    def _keep(self, pending: _Pending, request: EvaluationRequest, by_prompt: Mapping[int, Sequence[float]]) -> None:
        """Store the accuracy of each prompt for comparisons.

        Training does not need it, so a disk that refuses it is only logged, once."""
        held_out = self._sets.get(request.set)
        found = of_prompts(by_prompt, request.num_prompts)
        digest = held_out[0].digest if held_out is not None else ""
        row = PromptAccuracies(pending.number, pending.policy_version, request.set, digest, found)
        try:
            prompt_accuracies(self._ctx.run_dir).append(row)
        except OSError as error:
            if not self._is_refused:
                self._ctx.log.warning("prompt_accuracies_not_written", reason=str(error))
            self._is_refused = True

    def _settings(self, name: str) -> EvaluationSection:
        """A resumed run may no longer have the set."""
        return self._sets[name][1] if name in self._sets else self._ctx.config.evaluation
