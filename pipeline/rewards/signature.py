"""How a verifier is called: Headrace's own signature, TRL's or verl's; plain or async; with one
response or several per call.

A RewardFunction wraps a function: it takes responses and returns the function's result. The
sandbox's time limit bounds the call.

    judge(responses) -> list of numbers, Verdicts or VerifierFailures               Headrace's own
    reward(prompts, completions, **columns) -> list of numbers                      TRL's reward_funcs
    compute_score(data_source, solution_str, ground_truth, extra_info=None)         verl's custom_reward_function: a number,
                                                                                    or a dict with ``score`` and ``acc``
    compute_scores(data_sources, solution_strs, ground_truths, extra_infos)         verl's, for its batch reward manager

Parameter names (``completions``, ``solution_str``, ``solution_strs``) tell them apart, since TRL
and verl call by name. Any of them may be ``async``. A function that takes several responses per
call declares it: ``judge.max_batch = 16``.

TRL's and verl's functions see a response as the model wrote it: with special tokens such as
``<think>``, without the stop token. ``reward.skip_special_tokens = True`` on the function removes
them all. In Headrace's own signature ``response_text`` has none of them, ``written_text`` all.

Sources: TRL's GRPOTrainer calls ``func(prompts=, completions=, completion_ids=, **columns)``, each
a list; verl's NaiveRewardManager calls ``func(data_source=, solution_str=, ground_truth=,
extra_info=)``, its BatchRewardManager the plurals."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from pipeline.rewards.verifier import (
    Response,
    Verdict,
    VerifierFailure,
    VerifierFailureKind,
    VerifierOutcome,
    number_of,
    shown,
)
from protocol.errors import ConfigError

MAX_BATCH = 1024
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NOT_COLUMNS = frozenset({"trainer_state", "environments", "log_extra", "log_metric"})
"""Arguments that TRL's trainer passes besides texts, tokens and columns; here verifiers do not get them."""

_OWN = inspect.signature(lambda responses: responses)


class Style(StrEnum):
    """Whose signature a verifier has."""

    OWN = "Headrace's"
    TRL = "TRL's"
    VERL = "verl's"
    VERL_BATCH = "verl's batch"


class RewardFunction:
    """Calls a verifier the same way whatever its signature."""

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        """Recognise the signature. Raises ConfigError for any other."""
        self._function = function
        self._path = path
        self._runner: asyncio.Runner | None = None
        self.max_batch = _max_batch(function, path)
        self.skips_special_tokens = _skips_special_tokens(function, path)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  an object with an async __call__
        )
        try:
            signature = inspect.signature(function)
        except ValueError:
            # some functions in C have no signature
            signature = _OWN
        parameters = signature.parameters
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._names = frozenset(name for name, p in parameters.items() if p.kind in _BY_NAME)
        self._required = frozenset(name for name in self._names if parameters[name].default is inspect.Parameter.empty)
        self.style = self._recognised(signature)

    def __call__(self, responses: Sequence[Response], *, any_number: bool = False, judgments: bool = False) -> object:
        """Return the verifier's unchecked result: one outcome per response, or one text if it writes ``judgments``."""
        if self.skips_special_tokens:
            responses = [msgspec.structs.replace(response, raw_text=None) for response in responses]
        match self.style:
            case Style.OWN:
                return _as_list(self._settled(self._function(list(responses))))
            case Style.TRL:
                return _as_list(self._settled(self._function(**self._chosen(_trl_arguments(responses)))))
            case Style.VERL:
                returned = [self._function(**self._chosen(_verl_arguments(response))) for response in responses]
                if any(inspect.isawaitable(one) for one in returned):
                    returned = self._settled(_all(returned))
            case Style.VERL_BATCH:
                singles = [_verl_arguments(response) for response in responses]
                lists = {f"{name}s": [single[name] for single in singles] for name in singles[0]}
                returned = _as_list(self._settled(self._function(**self._chosen(lists))))
        if judgments or not isinstance(returned, list):
            return returned
        return [_verl_outcome(one, self._path, any_number=any_number) for one in returned]

    def close(self) -> None:
        """Close the event loop of an async verifier."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _recognised(self, signature: inspect.Signature) -> Style:
        known = {"completions": Style.TRL, "solution_str": Style.VERL, "solution_strs": Style.VERL_BATCH}
        for name, style in known.items():
            if name in self._names:
                self._refuse_unknown(style)
                return style
        try:
            signature.bind([])
        except TypeError:
            raise ConfigError(
                f"verifier {self._path!r} has the signature {signature}; give it one of these: judge(responses) -> list; TRL's "
                "reward(prompts, completions, **columns) -> list of numbers; verl's compute_score(data_source, solution_str, "
                "ground_truth, extra_info=None) -> number or dict"
            ) from None
        return Style.OWN

    def _refuse_unknown(self, style: Style) -> None:
        known = {
            Style.VERL: {"data_source", "solution_str", "ground_truth", "extra_info"},
            Style.VERL_BATCH: {"data_sources", "solution_strs", "ground_truths", "extra_infos"},
        }
        unknown = self._required & _NOT_COLUMNS if style is Style.TRL else self._required - known[style]
        if unknown:
            raise ConfigError(
                f"verifier {self._path!r} has {style} signature and needs {', '.join(sorted(unknown))}, which Headrace does "
                "not have; give it a default"
            )

    def _chosen(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments that the function takes. Raises TypeError if it needs others."""
        if missing := self._required - arguments.keys():
            raise TypeError(
                f"verifier {self._path!r} has {self.style} signature and needs the column {', '.join(sorted(missing))}; "
                f"the line has {', '.join(sorted(arguments.keys() - {'prompts', 'completions', 'completion_ids'}))}"
            )
        names = arguments.keys() if self._takes_all else arguments.keys() & self._names
        return {name: arguments[name] for name in names}

    def _settled(self, returned: object) -> Any:
        """Await an async verifier's result. One event loop serves the whole life of the process."""
        if not inspect.isawaitable(returned):
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_one(returned))


async def _one(returned: Awaitable[object]) -> object:
    return await returned


async def _all(returned: Sequence[Any]) -> list[object]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(_one(one)) for one in returned]
    return [task.result() for task in started]


def _max_batch(function: object, path: str) -> int:
    size = getattr(function, "max_batch", 1)
    if not isinstance(size, int) or not 1 <= size <= MAX_BATCH:
        expected = f"it must be a whole number from 1 to {MAX_BATCH}"
        raise ConfigError(f"verifier {path!r} has max_batch = {size!r}; {expected}")
    return size


def _skips_special_tokens(function: object, path: str) -> bool:
    skips = getattr(function, "skip_special_tokens", False)
    if not isinstance(skips, bool):
        raise ConfigError(f"verifier {path!r} has skip_special_tokens = {skips!r}; it must be True or False")
    return skips


def _trl_arguments(responses: Sequence[Response]) -> dict[str, object]:
    """Return texts, tokens and columns as lists under TRL's names; the answer is the column ``answer``."""
    names = {name for response in responses for name in response.extra} - _NOT_COLUMNS
    columns: dict[str, object] = {name: [r.extra.get(name) for r in responses] for name in names}
    return {
        **columns,
        "answer": [response.answer for response in responses],
        "prompts": [response.prompt_text for response in responses],
        "completions": [response.written_text for response in responses],
        "completion_ids": [response.token_ids for response in responses],
    }


def _verl_arguments(response: Response) -> dict[str, object]:
    extra = response.extra.get("extra_info")
    return {
        "data_source": response.extra.get("data_source", ""),
        "solution_str": response.written_text,
        "ground_truth": response.answer,
        "extra_info": dict(response.extra) if extra is None else extra,
    }


def _as_list(returned: object) -> object:
    """Turn a one-dimensional array or tensor into a list. Other types are left for the check of outcomes."""
    to_list = getattr(returned, "tolist", None)
    if callable(to_list) and len(getattr(returned, "shape", ())) == 1:
        return to_list()
    return list(returned) if isinstance(returned, tuple) else returned


def _verl_outcome(returned: object, path: str, *, any_number: bool) -> VerifierOutcome | object:
    """Read a number, or a dict with ``score`` and perhaps ``acc``. ``acc`` is the accuracy if
    present; with ``any_number`` the score comes first."""
    if isinstance(returned, Verdict | VerifierFailure):
        return returned
    names = ("score", "acc") if any_number else ("acc", "score")
    found = returned.get(names[0], returned.get(names[1])) if isinstance(returned, dict) else returned
    if returned is None and any_number:
        return None
    number = number_of(found)
    if number is not None and (any_number or 0.0 <= number <= 1.0):
        return Verdict(accuracy=number)
    return VerifierFailure(
        kind=VerifierFailureKind.BAD_VERDICT,
        error=f"verifier {path}, of verl's signature, returned {shown(returned)}; return a score in [0, 1], or a dict "
        "with `score` and an `acc` in [0, 1], which counts as accuracy",
    )
