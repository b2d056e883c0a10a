"""What the start model answers to a run's first prompts, and what stands out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import msgspec

from pipeline.config.schema import RunConfig
from pipeline.observability.estimates import Estimate, average, pass_at
from pipeline.preflight.ask import ask
from protocol.errors import ConfigError
from protocol.trajectory import FinishReason


class TriedResponse(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    """As it was sampled, special tokens included."""
    num_tokens: int
    finish_reason: str
    accuracy: float | None = None
    """None without a verdict; ``reason`` then says why."""
    reward: float | None = None
    parts: dict[str, float] = {}
    masked: bool = False
    reason: str = ""
    """What decided the verdict, in the verifier's words."""

    @property
    def verdict(self) -> str:
        """``right``, ``wrong``, ``no verdict``, or the accuracy."""
        if self.accuracy is None:
            return "no verdict"
        return {0.0: "wrong", 1.0: "right"}.get(self.accuracy, f"accuracy {self.accuracy:.2f}")

    @property
    def is_cut(self) -> bool:
        """Whether the limit of tokens ended it."""
        return self.finish_reason == FinishReason.LENGTH


class TriedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    prompt_id: str
    text: str
    """As the model reads it: its tokens as text, special ones included."""
    num_tokens: int
    answer: str
    verifier: str
    responses: list[TriedResponse]

    @property
    def accuracies(self) -> list[float]:
        """Accuracies of the responses with a verdict."""
        return [one.accuracy for one in self.responses if one.accuracy is not None]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    temperature: float
    prompts: list[TriedPrompt]

    @property
    def responses(self) -> list[TriedResponse]:
        return list(chain.from_iterable(prompt.responses for prompt in self.prompts))

    @property
    def accuracy(self) -> Estimate | None:
        """Mean over the responses with a verdict; None if there are none."""
        by_prompt = {place: prompt.accuracies for place, prompt in enumerate(self.prompts)}
        return average(by_prompt) if any(by_prompt.values()) else None

    def pass_at(self, k: int) -> Estimate | None:
        """Return pass@k; None when no prompt has that many verdicts."""
        return pass_at({place: prompt.accuracies for place, prompt in enumerate(self.prompts)}, k)

    @property
    def num_unjudged(self) -> int:
        return sum(one.accuracy is None for one in self.responses)

    @property
    def num_with_signal(self) -> int:
        """Prompts with responses of different accuracy, so that a group baseline can learn from
        them."""
        return sum(len(set(prompt.accuracies)) > 1 for prompt in self.prompts)

    def remarks(self) -> Iterator[str]:
        """Yield what a person should know before a run is started, most serious first."""
        responses = self.responses
        judged = [one for one in responses if one.accuracy is not None]
        if not judged:
            yield "no response has a verdict: fix the verifier, whose error is above"
        elif self.num_unjudged:
            yield f"{self.num_unjudged} of {len(responses)} responses have no verdict; a run would leave them out"
        if len(judged) > 1 and all(one.accuracy == 0.0 for one in judged):
            yield (
                "no response is right, so nothing can be learned from these prompts: compare responses, answers and the "
                "reasons above; if right ones were refused, change data.verifier, else take easier prompts"
            )
        if len(judged) > 1 and all(one.accuracy == 1.0 for one in judged):
            yield "every response is right, so nothing can be learned from these prompts: take harder ones"
        if responses and all(one.is_cut for one in responses):
            yield (
                "every response was cut at generation.max_response_tokens: raise it, or check whether the model ends its turn "
                "(chat template, end tokens)"
            )
        elif num_cut := sum(one.is_cut for one in responses):
            yield f"{num_cut} of {len(responses)} responses were cut at generation.max_response_tokens"
        if responses and not any(one.text.strip() for one in responses):
            yield "every response is empty"
        yield from self._constant_parts(judged)

    def _constant_parts(self, judged: list[TriedResponse]) -> Iterator[str]:
        names = dict.fromkeys(chain.from_iterable(one.parts for one in judged))
        for name in names:
            values = {one.parts.get(name) for one in judged}
            if len(judged) > 1 and len(values) == 1 and name not in ("correct", "overlong"):
                yield f"{name} gave {values.pop():g} for every response: a reward that never differs teaches nothing"


def try_model(config: RunConfig, *, num_prompts: int, num_samples: int, timeout_s: float) -> Trial:
    """Sample the first training prompts with the start model and judge the responses, in a separate
    process. Raises ConfigError with the reason if that fails."""
    try:
        answer = ask("workers.trial", config, str(num_prompts), str(num_samples), timeout_s=timeout_s)
    except TimeoutError as error:
        raise ConfigError(f"{error}; try fewer prompts with --num, or give it more time with --timeout") from None
    if answer.refusal is not None:
        raise ConfigError(answer.refusal)
    return msgspec.json.decode(answer.notes.splitlines()[-1], type=Trial)
