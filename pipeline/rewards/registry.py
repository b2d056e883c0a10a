"""Registered names of verifiers, and where each verifier is.

Data lines and messages may name registered verifiers, and import paths that the configuration also
names. Nothing is imported here: a verifier that fails or hangs at import does so in its sandbox."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Container
from dataclasses import dataclass

from pipeline.config.data_sets import GENERATED_VERIFIER
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
    """Whether it runs in a killable process; otherwise in the worker itself, on whole batches."""
    sound: bool = False
    """Whether a response that twice ends the process is to blame: it then counts as not judged, not as a failure."""
    whole_group: bool = False
    """Whether a call gets all responses of a group."""
    any_number: bool = False
    """Whether its numbers may be outside [0, 1], as in ``reward.functions``."""
    judgments: bool = False
    """Whether it writes judgments: texts instead of numbers."""


BY_MODEL = frozenset({"reward_model", "reward_model_sigmoid"})
"""Verifiers that only read the reward model's score: the run needs such a model, lines need no answer."""

ENDPOINT = "endpoint/"
"""Prefix of the names of endpoints."""
_RUN_PROGRAMS = frozenset({"code", "code_share", GENERATED_VERIFIER})
"""Verifiers that run what a line or an answer says, which the data alone must not choose."""
RECORDED = "recorded"
"""The verifier for response files, whose lines have the verdict."""
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
    """Give ``package.module:function`` a short name. Set ``sandboxed`` to False only for cheap
    functions that are not async and cannot hang on any response. Set ``sound`` only for functions
    that no response should crash: if one does twice, it counts as not judged.

    Raises ConfigError if the name belongs to another path, or the path is not an import path."""
    spec = VerifierSpec(name, path, sandboxed, sound)
    if not is_import_path(path):
        raise ConfigError(f"verifier {name!r}: {path!r} is not an import path; write package.module:function")
    if _SPECS.setdefault(name, spec) != spec:
        raise ConfigError(f"verifier {name!r} is registered as {_SPECS[name].path} already; choose another name")
    return spec


def names() -> list[str]:
    return sorted(_SPECS)


def needs_answer(verifier: str) -> bool:
    """Return whether lines for a verifier need an answer; for programs they may have tests instead."""
    return verifier not in _ANSWERLESS and not verifier.startswith(ENDPOINT)


def resolve(name: str) -> VerifierSpec:
    """Find a verifier by registered name, import path or endpoint name. Raises ConfigError if it is none of them."""
    spec = _SPECS.get(name)
    if spec is not None:
        return spec
    if is_import_path(name):
        return VerifierSpec(name, name, sandboxed=True)
    if name.startswith(ENDPOINT):
        return VerifierSpec(name, name, sandboxed=False)
    close = difflib.get_close_matches(name, _SPECS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names())};"
    raise ConfigError(f"unknown verifier {name!r}: {hint} name your own function as package.module:function")


def resolve_judgments(name: str) -> VerifierSpec:
    """Find a source of judgments by its name in ``guidance.judgments``. Raises ConfigError if there is none."""
    built_in = _JUDGMENTS.get(name)
    if built_in is not None:
        return built_in
    if is_import_path(name):
        return VerifierSpec(name, name, sandboxed=True, judgments=True)
    if name.startswith(ENDPOINT):
        return VerifierSpec(name, name, sandboxed=False, judgments=True)
    raise ConfigError(
        f"there are no judgments {name!r}; choose one of {', '.join(_JUDGMENTS)}, endpoint/NAME, or your own function as "
        "package.module:function"
    )


def resolve_named(name: str, configured: Container[str]) -> VerifierSpec:
    """Find the verifier that a data line or a message names. An import path is code to run, so the
    configuration must name it too. Raises ConfigError if the name is unknown, or an import path not
    in ``configured``."""
    spec = resolve(name)
    if name.startswith(ENDPOINT) and name not in configured:
        raise ConfigError(
            f"verifier {name!r} is not an endpoint; define it in [reward.endpoints.{name.removeprefix(ENDPOINT)}]"
        )
    if name in _RUN_PROGRAMS and name not in configured:
        raise ConfigError(
            f"verifier {name!r} runs texts of the data as code, so a data line may not choose it: if you trust "
            f"the data, set data.verifier to it, or add it to reward.verifiers"
        )
    if name not in _SPECS and name not in configured:
        raise ConfigError(
            f"verifier {name!r} is an import path, and data may name registered verifiers only ({', '.join(names())}): if you "
            "trust that code, add it to reward.verifiers in the configuration"
        )
    return spec


def load(path: str) -> RewardFunction:
    """Import the function at ``package.module:function``, and run its module's ``warm_up()`` if it
    has one. Raises ConfigError if module or function do not exist, it is not callable, or its
    signature is unknown. Errors inside the module propagate."""
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
# its module also generates the data
register(GENERATED_VERIFIER, "pipeline.data.reasoning_gym:verify")
