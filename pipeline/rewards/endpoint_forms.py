"""What is sent to an endpoint of rewards, and how its reply is read.

Pure. With ``model`` an endpoint is an OpenAI-compatible chat API, which gets one message and ends
its reply by ``Score: N``. Without it the address gets the response itself, and returns a number.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pipeline.config.judging import EndpointSection
from pipeline.rewards.verifier import Response, Verdict

_SCORE = re.compile(r"score\W{0,8}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
"""What reading a reply raises where the reply is not of its form."""


def request_body(settings: EndpointSection, response: Response) -> bytes:
    """Return the request of one judgement."""
    if settings.model is None:
        told = {
            "prompt": response.prompt_text,
            "response": response.response_text,
            "answer": response.answer,
            "extra": response.extra,
            "num_tokens": response.num_tokens,
            "finish_reason": str(response.finish_reason),
        }
        return json.dumps({"responses": [told]}, default=str).encode()
    texts = {"prompt": response.prompt_text, "answer": response.answer, "response": response.response_text}
    # one pass: a text that holds {answer} stays as it is
    prompt = re.sub(r"\{(prompt|answer|response)\}", lambda found: texts[found[1]], settings.prompt)
    request: dict[str, Any] = {
        "model": settings.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": settings.max_reply_tokens,
    }
    return json.dumps(request).encode()


def verdict_of(settings: EndpointSection, text: str) -> Verdict:
    """Read a reply. Raises one of ``UNREADABLE`` where it has no number."""
    told = json.loads(text)
    return _number(told) if settings.model is None else _score(told, settings.scale)


def _number(told: Any) -> Verdict:
    """Read ``{"scores": [number]}``."""
    (number,) = told["scores"]
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError(number)
    return Verdict(accuracy=float(number))


def _score(told: Any, scale: float) -> Verdict:
    """Read the judge's last `Score: N`."""
    content = told["choices"][0]["message"]["content"]
    number = float(_SCORE.findall(content)[-1]) / scale
    if not 0.0 <= number <= 1.0:
        raise ValueError(number)
    return Verdict(accuracy=number, reason=content.strip()[-200:])
