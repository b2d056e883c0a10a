"""Successive batching: which windows of which responses are generated in each step of a synchronous T-PPO run.

*Consumes* what each window produced. *Produces* the next step's windows: unfinished responses first, then new ones. *Waits for*
nothing: a pure state machine, the reference that windowed generation is checked against. Source: T-PPO (2506.15050) and its
port; that a carried response keeps its slot is our reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduledWindow:
    """One slot's work in one step: extend a response from ``start`` to at most ``limit`` tokens."""

    response: int
    start: int
    limit: int
    first_step: int
    """Step in which the response began; the versions by which its oldest token lags are ``step - first_step``."""


@dataclass(frozen=True, slots=True)
class WindowResult:
    """What a window became."""

    window: ScheduledWindow
    end: int
    """Response tokens after the step."""
    is_eos: bool
    """Whether an end-of-sequence token was sampled, at the cap too."""
    is_finished: bool
    """By end of sequence, or cut at the cap: both are scored, neither is carried."""
    lag: int
    """Versions between the response's oldest token and the step's policy."""

    @property
    def num_policy_tokens(self) -> int:
        """Tokens of this window: they train the policy in this step, finished or not."""
        return self.end - self.window.start

    @property
    def num_value_tokens(self) -> int:
        """Tokens of the whole response if it finished here, else none: the value model learns from finished responses."""
        return self.end if self.is_finished else 0


@dataclass(slots=True)
class SuccessiveBatching:
    """Slots that are never idle while there are responses to begin."""

    num_slots: int
    window_tokens: int
    max_response_tokens: int
    step: int = 0
    next_response: int = 0
    """Responses are begun in the order of their numbers."""
    carried: tuple[ScheduledWindow, ...] = ()
    """Unfinished, in slot order."""

    def fill(self, num_responses: int) -> list[ScheduledWindow]:
        """Return this step's windows: those carried, then new ones up to ``num_responses`` ever begun."""
        num_new = min(self.num_slots - len(self.carried), num_responses - self.next_response)
        first = self.next_response
        limit = min(self.window_tokens, self.max_response_tokens)
        fresh = [ScheduledWindow(response, 0, limit, self.step) for response in range(first, first + num_new)]
        self.next_response += num_new
        return [*self.carried, *fresh]

    def finish(self, produced: Iterable[tuple[ScheduledWindow, int, bool]]) -> list[WindowResult]:
        """Take (window, its end, whether it ended by a stop token) of a step, and carry what is unfinished.

        Raises:
            ValueError: A window ended outside its bounds, or stopped short of its limit without a stop token.
        """
        results = [self._result(window, end, is_eos) for window, end, is_eos in produced]
        self.carried = tuple(
            ScheduledWindow(
                result.window.response,
                result.end,
                min(result.end + self.window_tokens, self.max_response_tokens),
                result.window.first_step,
            )
            for result in results
            if not result.is_finished
        )
        self.step += 1
        return results

    def _result(self, window: ScheduledWindow, end: int, is_eos: bool) -> WindowResult:
        if not window.start < end <= window.limit or (end < window.limit and not is_eos):
            raise ValueError(
                f"the window {window.start}..{window.limit} of response {window.response} ended at {end} with is_eos {is_eos}; "
                "expected it to reach its limit or a stop token"
            )
        is_finished = is_eos or end == self.max_response_tokens
        return WindowResult(window, end, is_eos, is_finished, self.step - window.first_step)
