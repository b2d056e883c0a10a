"""Names of verifiers, and where each is.

Data lines and messages may name registered verifiers, and import paths that the configuration names
too. Nothing is imported here: a verifier that fails or hangs at import does so in its sandbox."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Container
from dataclasses import dataclass

from pipeline.config.import_path import import_object, is_import_path
from pipeline.rewards.signature import RewardFunction
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """Where a verifier is and how it runs."""

    name: str
    path: str
    """``package.module:function``"""
    sandboxed: bool
    """Whether it runs in a killable process; else in the worker itself, by the batch."""
    sound: bool = False
    """Whether a response that ends the process twice is to blame: it is not judged, no failure."""
    whole_group: bool = False
    """Whether a call has all responses of a group."""
    any_number: bool = False
    """Whether its numbers may be outside of [0, 1], as those of ``reward.functions`` may."""
    judgments: bool = False
    """Whether it writes judgments: texts in place of numbers."""


BY_MODEL = frozenset({"reward_model", "reward_model_sigmoid"})
"""Verifiers that read only the reward model's score: the run needs such a model, lines need no answer."""

ENDPOINT = "endpoint/"
"""Names of endpoints, from the configuration, start so."""
_RUN_PROGRAMS = frozenset({"code", "code_share"})
"""Verifiers that run programs and tests: data alone must not choose them."""
RECORDED = "recorded"
"""The verifier of response files: the line has the verdict."""
_ANSWERLESS = BY_MODEL | _RUN_PROGRAMS | {RECORDED}

_SPECS: dict[str, VerifierSpec] = {}
_JUDGMENTS = {
    name: VerifierSpec(name, f"pipeline.rewards.{module}:judgments", sandboxed=sandboxed, judgments=True)
    for name, module, sandboxed in (
        ("arithmetic", "judgments.by_arithmetic", False),
        ("math", "judgments.by_math", True),
        (RECORDED, "recorded", False),
    )
}


def register(name: str, path: str, *, sandboxed: bool = True, sound: bool = False) -> VerifierSpec:
    """Give ``package.module:function`` a short name. ``sandboxed`` is False only for cheap
    functions that cannot hang, whatever the response, and are not async. ``sound`` is True only for
    functions that no response should end: where one does twice, the answer is not judged.

    Raises ConfigError: the name is taken by another path, or the path is not an import path."""
    spec = VerifierSpec(name, path, sandboxed, sound)
    if not is_import_path(path):
        raise ConfigError(f"verifier {name!r}: {path!r} is not an import path; write package.module:function")
    if _SPECS.setdefault(name, spec) != spec:
        raise ConfigError(f"verifier {name!r} is registered as {_SPECS[name].path} already; choose another name")
    return spec


def names() -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_SPECS)


def needs_answer(verifier: str) -> bool:
    """Return whether lines for a verifier need an answer: a program may have tests instead."""
    return verifier not in _ANSWERLESS and not verifier.startswith(ENDPOINT)


def resolve(name: str) -> VerifierSpec:
    """Find a verifier by its registered name or its import path. Raises ConfigError: neither."""
    spec = _SPECS.get(name)
    if spec is not None:
        return spec
    if is_import_path(name):
        return VerifierSpec(name, name, sandboxed=True)
    if name.startswith(ENDPOINT):
        return VerifierSpec(name, name, sandboxed=False)
    close = difflib.get_close_matches(name, _SPECS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names())};"
    raise ConfigError(f"unknown verifier {name!r}: {hint} your own function is named as package.module:function")


def resolve_judgments(name: str) -> VerifierSpec:
    """Find what writes judgments, by the name in ``guidance.judgments``. Raises ConfigError: there
    is none of that name."""
    built_in = _JUDGMENTS.get(name)
    if built_in is not None:
        return built_in
    if is_import_path(name):
        return VerifierSpec(name, name, sandboxed=True, judgments=True)
    if name.startswith(ENDPOINT):
        return VerifierSpec(name, name, sandboxed=False, judgments=True)
    raise ConfigError(
        f"judgments {name!r} do not exist; there are {', '.join(_JUDGMENTS)}, endpoint/NAME, and your own function as "
        "package.module:function"
    )


def resolve_named(name: str, configured: Container[str]) -> VerifierSpec:
    """Find the verifier that a data line or a message names. An import path is code to run: the
    configuration alone may name it, never the data. Raises ConfigError: the name is unknown, or an
    import path that is not among ``configured``."""
    spec = resolve(name)
    if name.startswith(ENDPOINT) and name not in configured:
        raise ConfigError(
            f"verifier {name!r} is not an endpoint; define it in [reward.endpoints.{name.removeprefix(ENDPOINT)}]"
        )
    if name in _RUN_PROGRAMS and name not in configured:
        raise ConfigError(
            f"verifier {name!r} runs tests from the data as code, so a data line may not choose it: if you trust "
            f"the data, set data.verifier to it, or add it to reward.verifiers"
        )
    if name not in _SPECS and name not in configured:
        raise ConfigError(
            f"verifier {name!r} is an import path, and data may name registered verifiers only ({', '.join(names())}): if you "
            "trust that code, add it to reward.verifiers in the configuration"
        )
    return spec


def load(path: str) -> RewardFunction:
    """Import the function at ``package.module:function``, and run its module's ``warm_up()`` where
    there is one. Raises ConfigError: the module or the function is not there, it is not callable,
    or its signature is unknown. Errors inside the module pass through."""
    found = import_object("verifier", path, "install it, or name its folder in reward.path (headrace score: --path)")
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"verifier {path!r} is a {kind}; it must be a function of a list of responses")
    judge = RewardFunction(found, path)
    warm_up = getattr(sys.modules[path.partition(":")[0]], "warm_up", None)
    if callable(warm_up):
        warm_up()
    return judge


register("arithmetic", "pipeline.rewards.arithmetic:verify", sandboxed=False)
register("dapo_math", "pipeline.rewards.dapo_math:verify", sandboxed=False)
register("math", "pipeline.rewards.equivalence:verify", sound=True)
register("math_strict", "pipeline.rewards.equivalence:verify_strictly", sound=True)
register("math_loose", "pipeline.rewards.equivalence:verify_loosely", sound=True)
register("reward_model", "pipeline.rewards.by_model:above_zero", sandboxed=False)
register("reward_model_sigmoid", "pipeline.rewards.by_model:sigmoid", sandboxed=False)
register(RECORDED, "pipeline.rewards.recorded:verify", sandboxed=False)
register("code", "pipeline.rewards.programs:verify", sound=True)
register("code_share", "pipeline.rewards.programs:verify_share", sound=True)
