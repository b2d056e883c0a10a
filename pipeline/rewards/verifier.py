"""The types of verification, and the interface of every verifier.

A verifier is a plain function from finished responses to one outcome each, in order:

    def verify(responses):
        return [float(r.response_text.strip() == r.answer) for r in responses]

It may also return ``Verdict`` (with further terms of the reward) or ``VerifierFailure`` (this
response cannot be judged). Raising fails every response of the call, so sandboxed verifiers are
called with one response at a time. An answer that is not judged in time has no verdict either: it
is tried again, and is never wrong unless ``reward.late`` says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from enum import StrEnum
from numbers import Real
from typing import Any

import msgspec

from protocol.trajectory import FinishReason

RESERVED_PARTS = frozenset({"correct", "environment", "model", "overlong"})
"""Terms that reward shaping adds; a verdict may not use these names."""


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response, with its answer and the name of its verifier."""

    prompt_text: str = ""
    response_text: str
    """The whole response, decoded without special tokens."""
    raw_text: str | None = None
    """The same with special tokens such as ``<think>``, if there are any, but without the stop
    token. Use ``written_text`` to get either."""
    token_ids: list[int] = []
    """The response's tokens, including the stop token; empty if only its text is known."""
    answer: str
    verifier: str
    """Name in the registry, or ``package.module:function``."""
    extra: dict[str, Any] = {}
    """The other columns of the prompt's line."""
    num_tokens: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    model_score: float | None = None
    """The reward model's score minus ``reward.model.center``; None without a reward model."""

    @property
    def written_text(self) -> str:
        """The response as written, including special tokens."""
        return self.response_text if self.raw_text is None else self.raw_text

    @property
    def gold_text(self) -> str:
        """The line's column ``gold`` or ``solution``, else its answer."""
        columns = (self.extra.get(name) for name in ("gold", "solution"))
        return next((text for text in columns if isinstance(text, str) and text.strip()), self.answer)


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """The judgement of one response."""

    accuracy: float
    """Raw correctness in [0, 1], by which dynamic sampling filters. Any finite number for a
    function of ``reward.functions``."""
    parts: dict[str, float] = {}
    """Further terms of the reward by name, such as ``{"format": 0.1}``."""
    reason: str = ""
    """The deciding fact in a few words, for people."""
    applies: bool = True
    """False if a function of ``reward.functions`` returned None: it adds no part to this response."""
    judged: bool = True
    """False for an answer that exceeds the verifier's own limits, which counts as wrong."""


class VerifierFailureKind(StrEnum):
    """Why a response has no verdict."""

    RAISED = "raised"
    """the verifier raised, or could not be imported"""
    NOT_LOADED = "not_loaded"
    """its process did not start and import it in time"""
    DIED = "died"
    """its process ended: memory limit, crash, or exit"""
    BAD_VERDICT = "bad_verdict"
    """it returned something that is not a verdict"""
    BAD_ANSWER = "bad_answer"
    """the answer in the data cannot be judged by this verifier"""
    UNKNOWN_VERIFIER = "unknown_verifier"
    """the data names a verifier that does not exist"""
    UNREACHABLE = "unreachable"
    """an endpoint refused the response, or returned no readable number"""
    OUTAGE = "outage"
    """an endpoint was down or limited the rate; the response is not to blame and waits"""
    BUDGET = "budget"
    """an endpoint's budget of requests is spent"""
    LATE = "late"
    """no verdict in time, which says nothing about the response"""
    OVER_BUDGET = "over_budget"
    """judging took more processor time than a call may use"""
    PUT_OFF = "put_off"
    """another member of its group has no verdict yet, and a reward needs all of them"""
    NOTHING_FOUND = "nothing_found"
    """no wrong step was found for a judgment"""


class VerifierFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """A verifier failed on a response. It is retried elsewhere, then becomes a dead letter; it is never wrong."""

    kind: VerifierFailureKind
    error: str
    """Includes the verifier's traceback if there is one."""


VerifierOutcome = Verdict | VerifierFailure
NOT_IN_TIME = frozenset({VerifierFailureKind.LATE, VerifierFailureKind.OVER_BUDGET})
"""Failures that ``reward.late`` may turn into wrong answers."""


def not_judged(reason: str) -> Verdict:
    """Return the verdict of an answer that exceeds the limits of judging: wrong, and counted."""
    return Verdict(accuracy=0.0, reason=reason, judged=False)


def checked(
    returned: object, num_responses: int, *, who: str = "", any_number: bool = False, judgments: bool = False
) -> list[VerifierOutcome]:
    """Check an untrusted result; anything that is not an outcome becomes a failure naming ``who``
    returned it. With ``any_number`` accuracies need not be in [0, 1]. With ``judgments`` each item
    is a text or None, and becomes the reason of a verdict."""
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        what = f"it returned {type(returned).__name__}; return a list of one outcome per response"
        return [_bad(what, who)] * num_responses
    if len(returned) != num_responses:
        return [_bad(f"it returned {len(returned)} outcomes for {num_responses} responses", who)] * num_responses
    found: list[VerifierOutcome] = []
    for item in returned:
        outcome = _checked_judgment(item) if judgments else _checked_one(item, any_number=any_number)
        if (
            outcome is not item
            and isinstance(outcome, VerifierFailure)
            and outcome.kind is VerifierFailureKind.BAD_VERDICT
        ):
            outcome = _bad(outcome.error, who)
        found.append(outcome)
    return found


def _checked_judgment(item: object) -> VerifierOutcome:
    if isinstance(item, VerifierFailure):
        return item
    text = item.reason if isinstance(item, Verdict) else "" if item is None else item
    if not isinstance(text, str):
        return _bad(f"a judgment is {type(item).__name__}; return a text, or None where nothing wrong is found")
    text = text.strip()
    if not text:
        return VerifierFailure(kind=VerifierFailureKind.NOTHING_FOUND, error="nothing wrong was found in the response")
    if len(text) > MAX_JUDGMENT_CHARS:
        return _bad(f"a judgment has {len(text)} characters; at most {MAX_JUDGMENT_CHARS} are allowed: quote one step")
    return Verdict(accuracy=0.0, reason=text)


MAX_JUDGMENT_CHARS = 20_000
"""Longest judgment of any kind; ``guidance.max_judgment_tokens`` may be lower."""


def _checked_one(item: object, *, any_number: bool) -> VerifierOutcome:
    if isinstance(item, VerifierFailure):
        return item
    if item is None:
        return _no_number(any_number=any_number)
    given = item
    if not isinstance(item, Verdict):
        number = number_of(item)
        if number is None:
            kind = type(item).__name__
            return _bad(f"it returned {kind} for a response ({shown(item)}); return a number or a Verdict")
        item = Verdict(accuracy=number)
    if any_number and not item.applies:
        return item
    accuracy, parts = number_of(item.accuracy), item.parts
    number_shown = shown(item.accuracy if isinstance(given, Verdict) else given)
    if any_number:
        if accuracy is None or not abs(accuracy) <= MAX_NUMBER:
            return _bad(f"the number is {number_shown}; return a finite one of at most {MAX_NUMBER:g}")
    elif accuracy is None or not 0.0 <= accuracy <= 1.0:
        return _bad(f"accuracy is {number_shown}; it must be in [0, 1], put bonuses and penalties into parts")
    if not isinstance(parts, dict) or len(parts) > _MAX_PARTS:
        return _bad(f"parts must be a dict of at most {_MAX_PARTS} numbers")
    values: dict[str, float] = {}
    for name, part in parts.items():
        value = number_of(part)
        if not isinstance(name, str) or value is None or not abs(value) <= MAX_NUMBER:
            return _bad(
                f"part {name!r} is {shown(part)}; names are text, values finite numbers of at most {MAX_NUMBER:g}"
            )
        values[name] = value
        if name in RESERVED_PARTS:
            return _bad(f"part {name!r} is added by reward shaping; choose another name")
    if not isinstance(item.reason, str):
        return _bad(f"reason is {type(item.reason).__name__}; it must be text")
    return Verdict(
        accuracy=accuracy,
        parts=values,
        reason=item.reason[:_MAX_REASON_CHARS],
        judged=bool(item.judged),
    )


def number_of(value: object) -> float | None:
    """Return a real number of Python, numpy or torch as a float, infinity on overflow; None for anything else."""
    if isinstance(value, Real | Decimal):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        # numpy's bool, and zero-dimensional arrays and tensors
        return number_of(item())
    return None


def shown(value: object) -> str:
    """Return a value's repr, shortened."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a whole number of thousands of digits"


def _no_number(*, any_number: bool) -> VerifierOutcome:
    """Handle None, by which a function says that it does not apply. A verifier that decides
    accuracy must judge every response."""
    if any_number:
        return Verdict(accuracy=0.0, applies=False)
    return _bad(
        "it returned None (does not apply) for a response whose accuracy it must decide; list it in reward.functions "
        "besides a verifier that judges every response, or give these lines another verifier"
    )


MAX_NUMBER = 1e12
"""Largest magnitude of a reward; its square still fits float32, so that a group's std stays finite."""
_MAX_PARTS = 64
_MAX_REASON_CHARS = 200


def _bad(message: str, who: str = "") -> VerifierFailure:
    error = f"verifier {who}: {message}" if who else message
    return VerifierFailure(kind=VerifierFailureKind.BAD_VERDICT, error=error)
