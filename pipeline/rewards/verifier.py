"""The nouns of verification, and the seam that every verifier fills.

A verifier is a plain function from finished responses to one outcome for each, in order.

    def verify(responses):
        return [float(r.response_text.strip() == r.answer) for r in responses]

is a verifier. It may also return ``Verdict`` (with further summands of the reward) or
``VerifierFailure`` (this response cannot be judged). Raising fails every response of the call;
sandboxed verifiers are called with one response at a time, so that a failure has one owner. An
answer that is not judged in time has no verdict either: it is tried again, and never wrong unless
``reward.late`` says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from enum import StrEnum
from numbers import Real
from typing import Any, Protocol

import msgspec

from protocol.trajectory import FinishReason

RESERVED_PARTS = frozenset({"correct", "model", "overlong"})
"""Summands that shaping adds itself; a verdict may not carry them."""


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response, with its answer and its verifier's name."""

    prompt_text: str = ""
    response_text: str
    """The whole response, decoded without special tokens."""
    raw_text: str | None = None
    """The same with the special tokens inside of it, such as ``<think>``, where there are any; the
    stop token is left out. ``written_text`` is either."""
    token_ids: list[int] = []
    """The response's tokens, the stop token included; empty where only its text is known."""
    answer: str
    verifier: str
    """Name in the registry, or ``package.module:function``."""
    extra: dict[str, Any] = {}
    """Further columns of the prompt's line, unchanged."""
    num_tokens: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    model_score: float | None = None
    """The reward model's score less ``reward.model.center``; None in a run without one."""

    @property
    def written_text(self) -> str:
        """The response as it was written, special tokens included."""
        return self.response_text if self.raw_text is None else self.raw_text

    @property
    def gold_text(self) -> str:
        """The right answer: the line's column ``gold`` or ``solution``, else its answer."""
        columns = (self.extra.get(name) for name in ("gold", "solution"))
        return next((text for text in columns if isinstance(text, str) and text.strip()), self.answer)


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """A judgement of one response."""

    accuracy: float
    """Raw correctness in [0, 1]; dynamic sampling filters by this. Of a function in
    ``reward.functions`` any finite number."""
    parts: dict[str, float] = {}
    """Further summands of the reward by name, such as ``{"format": 0.1}``."""
    reason: str = ""
    """The deciding fact, in a few words, for readers of verdicts."""
    applies: bool = True
    """False where a function of ``reward.functions`` returned None: it has no number for this
    response, which is left out of its part."""
    judged: bool = True
    """False for an answer that cannot be judged within limits of its own, which counts as wrong."""


class VerifierFailureKind(StrEnum):
    """Why a response has no verdict."""

    RAISED = "raised"
    """the verifier raised, or could not be imported"""
    NOT_LOADED = "not_loaded"
    """its process had not started and imported it in time"""
    DIED = "died"
    """its process ended: memory limit, crash, or exit"""
    BAD_VERDICT = "bad_verdict"
    """it returned something that is not a verdict"""
    BAD_ANSWER = "bad_answer"
    """the answer in the data cannot be judged by this verifier"""
    UNKNOWN_VERIFIER = "unknown_verifier"
    """the data names a verifier that does not exist"""
    UNREACHABLE = "unreachable"
    """an endpoint refused the response, or had no readable number for it"""
    OUTAGE = "outage"
    """an endpoint was down or limited the rate: no fault of the response, which waits"""
    BUDGET = "budget"
    """an endpoint's budget of requests is spent"""
    LATE = "late"
    """there was no verdict in time, which says nothing about the response"""
    OVER_BUDGET = "over_budget"
    """judging it took more processor time than a call may take"""
    PUT_OFF = "put_off"
    """another member of its group has no verdict yet, and a reward needs all of them"""
    NOTHING_FOUND = "nothing_found"
    """nothing wrong was found to write a judgment about"""


class VerifierFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """A verifier's failure on a response: retried elsewhere, then a dead letter; never wrong."""

    kind: VerifierFailureKind
    error: str
    """The error, with the verifier's traceback where there is one."""


VerifierOutcome = Verdict | VerifierFailure
NOT_IN_TIME = frozenset({VerifierFailureKind.LATE, VerifierFailureKind.OVER_BUDGET})
"""Failures by the limits of a call, which ``reward.late`` may turn into wrong answers."""


def not_judged(reason: str) -> Verdict:
    """Return the verdict of an answer that exhausts the limits of judging: wrong, and counted."""
    return Verdict(accuracy=0.0, reason=reason, judged=False)


class Verifier(Protocol):
    """Judges responses."""

    def __call__(self, responses: Sequence[Response], /) -> Sequence[VerifierOutcome | float]:
        """Return one outcome for each response, in order; a number is an accuracy."""
        ...


def checked(
    returned: object, num_responses: int, *, who: str = "", any_number: bool = False, judgments: bool = False
) -> list[VerifierOutcome]:
    """Return the outcomes of an untrusted result; what is no outcome becomes a failure that names
    ``who`` returned it. ``any_number``: accuracies need not be in [0, 1]. ``judgments``: each is a
    text or None, and becomes the reason of a verdict."""
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
        return _bad(f"a judgment has {len(text)} characters; at most {MAX_JUDGMENT_CHARS} are taken: quote one step")
    return Verdict(accuracy=0.0, reason=text)


MAX_JUDGMENT_CHARS = 20_000
"""Longest judgment of any kind; ``guidance.max_judgment_tokens`` may allow less."""


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
    """Return a number of Python, numpy or torch as a float: infinity where it overflows, None
    for anything but one real number."""
    if isinstance(value, Real | Decimal):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        # numpy's bool, and arrays and tensors without dimensions
        return number_of(item())
    return None


def shown(value: object) -> str:
    """Return a value as it is written, shortened."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a whole number of thousands of digits"


def _no_number(*, any_number: bool) -> VerifierOutcome:
    """None means that a function does not apply to a response. The verifier that decides accuracy
    has to judge each one."""
    if any_number:
        return Verdict(accuracy=0.0, applies=False)
    return _bad(
        "it returned None, which says that it does not apply to this response, so nothing says whether it is right; "
        "name it in reward.functions beside a verifier that judges all, or give these lines another verifier"
    )


MAX_NUMBER = 1e12
"""Largest magnitude of a reward: its square still fits float32, so that a group's deviation is
finite."""
_MAX_PARTS = 64
_MAX_REASON_CHARS = 200


def _bad(message: str, who: str = "") -> VerifierFailure:
    error = f"verifier {who}: {message}" if who else message
    return VerifierFailure(kind=VerifierFailureKind.BAD_VERDICT, error=error)
