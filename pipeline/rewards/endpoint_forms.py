"""Requests to an endpoint of rewards, and the reading of its replies.

Pure. With ``model`` an endpoint is an OpenAI-compatible chat API, which gets one message and ends
its reply by ``Score: N``. Without it the address gets the response itself, and returns a number.

A judgment is a reply with two lines: ``Step:`` with the first wrong step, copied from the response,
and ``Wrong:`` with what is wrong with it. A reply that quotes nothing of the response is no
judgment: a guided pass could not find the tokens that it means."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from pipeline.config.judging import EndpointSection
from pipeline.rewards.verifier import Response, Verdict

_SCORE = re.compile(r"score\W{0,8}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_JUDGMENT = re.compile(r"(?ms)^[ \t*]*Step:[ \t*]*(.+?)\n\s*[ \t*]*Wrong:[ \t*]*(.+)\Z", re.IGNORECASE)
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
"""Errors of reading a reply that is not of its form."""


def request_body(settings: EndpointSection, response: Response) -> bytes:
    """Return the request of one judgement."""
    if settings.model is None:
        told = {
            "prompt": response.prompt_text,
            "response": response.written_text,
            "answer": response.answer,
            "extra": response.extra,
            "num_tokens": response.num_tokens,
            "finish_reason": str(response.finish_reason),
        }
        return json.dumps({"responses": [told]}, default=str).encode()
    return _chat(settings, settings.prompt, response, response.answer)


def judgment_request_body(settings: EndpointSection, response: Response) -> bytes:
    """Return the request for what is wrong with a response."""
    return _chat(settings, settings.judgment_prompt, response, response.gold_text)


def verdict_of(settings: EndpointSection, hidden: Callable[[str], str], text: str) -> Verdict:
    """Read a reply; ``hidden`` masks secrets in what is kept of it. Raises one of ``UNREADABLE`` where it has no number."""
    told = json.loads(text)
    return _number(told) if settings.model is None else _score(told, settings.scale, hidden)


def judgment_of(response: Response, hidden: Callable[[str], str], text: str) -> Verdict:
    """Read a reply: the judgment is the reason. Raises one of ``UNREADABLE`` where it is none, or
    quotes nothing of the response."""
    content: str = json.loads(text)["choices"][0]["message"]["content"]
    found = _JUDGMENT.search(content)
    if found is None:
        raise ValueError(content)
    step, what = (_tidy(part) for part in found.groups())
    if not step or not what or step not in _tidy(response.written_text):
        raise ValueError(step)
    return Verdict(accuracy=0.0, reason=hidden(f'the step "{step}" is wrong: {what}'))


def _chat(settings: EndpointSection, template: str, response: Response, answer: str) -> bytes:
    texts = {"prompt": response.prompt_text, "answer": answer, "response": response.written_text}
    # one pass: a text that holds {answer} stays as it is
    prompt = re.sub(r"\{(prompt|answer|response)\}", lambda found: texts[found[1]], template)
    request: dict[str, Any] = {
        "model": settings.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": settings.max_reply_tokens,
    }
    return json.dumps(request).encode()


def _tidy(text: str) -> str:
    """Return a text in one line, without the quotation marks around it."""
    return " ".join(text.split()).strip("`\"'“”*")


def _number(told: Any) -> Verdict:
    """Read ``{"scores": [number]}``."""
    (number,) = told["scores"]
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError(number)
    return Verdict(accuracy=float(number))


def _score(told: Any, scale: float, hidden: Callable[[str], str]) -> Verdict:
    """Read the judge's last `Score: N`."""
    content = told["choices"][0]["message"]["content"]
    number = float(_SCORE.findall(content)[-1]) / scale
    if not 0.0 <= number <= 1.0:
        raise ValueError(number)
    return Verdict(accuracy=number, reason=hidden(content.strip())[-200:])
