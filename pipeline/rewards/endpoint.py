"""A judge behind an OpenAI-compatible endpoint, or your own reward service behind HTTP.

With ``model`` an endpoint is an OpenAI-compatible chat API: it gets one message and ends its reply
with ``Score: N``. Without ``model`` the URL gets the response itself and returns a number.

There is one pool of connections, with a limit on requests in flight. A request for a score has one
deadline over all its tries, not counting time in which this machine was suspended. Until then it is
retried while the endpoint is down, limits the rate or sends unreadable replies. After that there is
no number, but the response is never wrong; if the endpoint was down or limited the rate, the
response is not to blame (``OUTAGE``). Numbers are cached by request content, up to a limit, and
equal requests wait for one another. The key comes from the environment, and no error repeats it.

A judgment is a reply with two lines: ``Step:`` with the first wrong step, copied from the response,
and ``Wrong:`` with what is wrong with it. A reply that quotes nothing of the response is rejected,
because a guided pass could not find the tokens. Judgments share limits, budget and cache, but no
response waits long for one: an unreadable reply is not retried, and after an outage the endpoint
gets no requests for judgments for ``timeout_s``.

Counters, each prefixed with the endpoint's name and a colon: ``requests``, ``retries``, ``cached``,
``rate_limited`` (replies of status 429), ``failed`` (requests without a number) and ``request_s``
(seconds of all requests)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import re
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx2

from pipeline.config.rewards import EndpointSection
from pipeline.ledger.url import hide_password
from pipeline.process import work
from pipeline.rewards.patience import Waited, patience
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome
from protocol.errors import ConfigError

_SCORE = re.compile(r"score\W{0,8}(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_JUDGMENT_LINES = re.compile(r"(?ms)^[ \t*]*Step:[ \t*]*(.+?)\n\s*[ \t*]*Wrong:[ \t*]*(.+)\Z", re.IGNORECASE)
UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
"""Errors raised on reading a malformed reply."""


def request_body(settings: EndpointSection, response: Response) -> bytes:
    if settings.model is None:
        fields = {
            "prompt": response.prompt_text,
            "response": response.written_text,
            "answer": response.answer,
            "extra": response.extra,
            "num_tokens": response.num_tokens,
            "finish_reason": str(response.finish_reason),
        }
        return json.dumps({"responses": [fields]}, default=str).encode()
    return _chat(settings, settings.prompt, response, response.answer)


def judgment_request_body(settings: EndpointSection, response: Response) -> bytes:
    return _chat(settings, settings.judgment_prompt, response, response.gold_text)


def verdict_of(settings: EndpointSection, hidden: Callable[[str], str], text: str) -> Verdict:
    """Read a reply with a number. ``hidden`` masks secrets in the part of it that is kept. Raises
    one of ``UNREADABLE`` if there is no number."""
    reply = json.loads(text)
    return _number(reply) if settings.model is None else _score(reply, settings.scale, hidden)


def judgment_of(response: Response, hidden: Callable[[str], str], text: str) -> Verdict:
    """Read a reply with a judgment, which becomes the verdict's reason. Raises one of
    ``UNREADABLE`` if it is not one, or quotes nothing of the response."""
    content: str = json.loads(text)["choices"][0]["message"]["content"]
    found = _JUDGMENT_LINES.search(content)
    if found is None:
        raise ValueError(content)
    step, what = (_tidy(part) for part in found.groups())
    if not step or not what or step not in _tidy(response.written_text):
        raise ValueError(step)
    return Verdict(accuracy=0.0, reason=hidden(f'the step "{step}" is wrong: {what}'))


def _chat(settings: EndpointSection, template: str, response: Response, answer: str) -> bytes:
    texts = {"prompt": response.prompt_text, "answer": answer, "response": response.written_text}
    # in one pass, so that a text containing {answer} is left alone
    prompt = re.sub(r"\{(prompt|answer|response)\}", lambda found: texts[found[1]], template)
    request: dict[str, Any] = {
        "model": settings.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": settings.max_reply_tokens,
    }
    return json.dumps(request).encode()


def _tidy(text: str) -> str:
    """Put a text on one line, without quotation marks around it."""
    return " ".join(text.split()).strip("`\"'“”*")


def _number(reply: Any) -> Verdict:
    """Read ``{"scores": [number]}``."""
    (number,) = reply["scores"]
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ValueError(number)
    return Verdict(accuracy=float(number))


def _score(reply: Any, scale: float, hidden: Callable[[str], str]) -> Verdict:
    """Read the judge's last `Score: N`."""
    content = reply["choices"][0]["message"]["content"]
    number = float(_SCORE.findall(content)[-1]) / scale
    if not 0.0 <= number <= 1.0:
        raise ValueError(number)
    return Verdict(accuracy=number, reason=hidden(content.strip())[-200:])


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_LONGEST_AFTER_S = 60.0
"""Longest Retry-After that is respected."""
_CHECK_S = 5.0
_MAX_REPLY_BYTES = 1 << 20
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses after which a retry may succeed."""
_RATE_LIMITED = 429
_LIMITING, _UNREADABLE = "limits the rate", "replies with something else"
_NUMBER, _JUDGMENT = "number", "judgment"


Budget = Callable[[str, int], Awaitable[bool]]
"""Takes one of the endpoint's allowed requests; returns whether one was left."""
Count = Callable[[str, float], None]
"""Adds to a counter."""
Read = Callable[[str], Verdict]
"""Reads a reply; raises one of ``UNREADABLE``."""


class _FailedTry(Exception):
    """A try failed. ``how`` says in a few words how the endpoint behaves."""

    def __init__(self, how: str, why: str, *, again: bool = True, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.how, self.again, self.after_s = how, again, after_s


class RewardEndpoint:
    """One endpoint of ``reward.endpoints``."""

    def __init__(
        self, name: str, settings: EndpointSection, *, budget: Budget | None = None, count: Count | None = None
    ) -> None:
        """Opens no connection yet. Without ``budget``, ``max_requests`` applies to this object alone."""
        self._name, self._settings = name, settings
        self._budget, self._counted = budget or self._own_budget, count or (lambda name, amount: None)
        self._key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        self._key_in_text = re.compile("".join(rf"(?:\\?{re.escape(one)}|\\u(?i:{ord(one):04x}))" for one in self._key))
        limits = httpx2.Limits(max_connections=settings.max_in_flight, max_keepalive_connections=settings.max_in_flight)
        self._client = httpx2.AsyncClient(
            limits=limits,
            timeout=settings.timeout_s,
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
        )
        self._room = asyncio.Semaphore(settings.max_in_flight)
        self._numbers: OrderedDict[bytes, Verdict] = OrderedDict()
        self._asked: dict[bytes, asyncio.Event] = {}
        self._spent: Counter[str] = Counter()
        self._trouble = ""
        self._not_before_s = self._away_until_s = 0.0

    @property
    def trouble(self) -> str:
        """How the endpoint misbehaves while responses wait for it, or ""."""
        return f"endpoint {self._name}, which {self._trouble}" if self._trouble and self._asked else ""

    async def check(self) -> None:
        """Test the endpoint before the run starts. Raises ConfigError if it does not answer,
        refuses the key, or the key's environment variable is not set."""
        where = f"reward.endpoints.{self._name}"
        if self._settings.api_key_env and not self._key:
            raise ConfigError(f"{where}.api_key_env names {self._settings.api_key_env}, which is not set; export it")
        url = self._settings.url.rstrip("/")
        try:
            status = await self._status(url if self._settings.model is None else f"{url}/models")
        except (TimeoutError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            how = hide_password(f"{url} does not answer ({self._safe(_named(error))})")
            raise ConfigError(f"{where}: {how}; start it, or correct its url") from None
        if status in (401, 403):
            raise ConfigError(
                f"{where}: {hide_password(url)} refuses the key, with status {status}; set {where}.api_key_env"
            )

    async def score(self, response: Response) -> VerifierOutcome:
        """Return a number for one response, or a failure after the deadline."""
        return await self._answer(
            request_body(self._settings, response), partial(verdict_of, self._settings, self._safe)
        )

    async def judgment(self, response: Response) -> VerifierOutcome:
        """Return what is wrong with a response, as the reason of a verdict, or a failure after the
        deadline. If the endpoint was down a moment ago, fail at once."""
        body, read = judgment_request_body(self._settings, response), partial(judgment_of, response, self._safe)
        return await self._answer(body, read, wanted=_JUDGMENT)

    async def _answer(self, body: bytes, read: Read, *, wanted: str = _NUMBER) -> VerifierOutcome:
        content = hashlib.sha256(body).digest()
        # safe without a deadline: the equal request has its own
        while content in self._asked:
            await self._asked[content].wait()
        if content in self._numbers:
            self._numbers.move_to_end(content)
            self._count("cached")
            return self._numbers[content]
        self._asked[content] = asyncio.Event()
        try:
            # safe without a deadline: the requests ahead have their own
            async with self._room, work.within_its_limit():
                if wanted == _JUDGMENT and time.monotonic() < self._away_until_s:
                    return self._failure("it was down a moment ago, so it is left alone for a while", is_outage=True)
                outcome = await self._ask(body, read, wanted)
        finally:
            self._asked.pop(content).set()
        if isinstance(outcome, Verdict):
            self._keep(content, outcome)
        else:
            self._count("failed")
            if outcome.kind is VerifierFailureKind.OUTAGE:
                self._away_until_s = time.monotonic() + self._settings.timeout_s
        return outcome

    async def aclose(self) -> None:
        """Close the connections. May be called more than once."""
        await self._client.aclose()

    async def _ask(self, body: bytes, read: Read, wanted: str) -> VerifierOutcome:
        """Try until there is an answer, or time or budget runs out. Time spent on the budget is not counted."""
        settings = self._settings
        left_s, backoff_s = settings.timeout_s, _FIRST_PAUSE_S
        why, num_tries, is_limited = "no try ended", 0, False
        while left_s > 0.0:
            pause_s = min(left_s, self._not_before_s - time.monotonic())
            if pause_s > 0.0:
                is_limited, why = True, self._trouble or why
                await asyncio.sleep(pause_s)
                left_s -= pause_s
                continue
            if settings.max_requests is not None and not await self._budget(self._name, settings.max_requests):
                return self._spent_all()
            waited = Waited(time.monotonic())
            try:
                async with patience(left_s, waited):
                    try:
                        num_tries += 1
                        verdict = await self._try(body, read, is_first=num_tries == 1)
                    except _FailedTry as error:
                        why = self._safe(str(error))
                        self._trouble, is_limited = f"{error.how}: {why}", error.how == _LIMITING
                        if not error.again or (error.how == _UNREADABLE and wanted == _JUDGMENT):
                            return self._failure(why)
                        if error.after_s > 0.0:
                            self._not_before_s = time.monotonic() + min(error.after_s, _LONGEST_AFTER_S)
                        else:
                            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                    else:
                        self._trouble, self._away_until_s = "", 0.0
                        return verdict
            except TimeoutError:
                self._trouble = self._trouble or f"does not answer within {settings.timeout_s:g} s"
            backoff_s = min(2 * backoff_s, _LONGEST_PAUSE_S)
            left_s -= waited.seconds
        why = f"no {wanted} within {settings.timeout_s:g} s; the last try: {why}"
        return self._failure(why, is_outage=is_limited or await self._is_down())

    async def _is_down(self) -> bool:
        """Return whether the endpoint answers nothing at all, so that the response is not to blame."""
        try:
            return await self._status(self._settings.url.rstrip("/")) in _AGAIN
        except (TimeoutError, httpx2.HTTPError):
            return True

    async def _status(self, url: str) -> int:
        """Return a reply's status without reading its body, which may be endless."""
        async with asyncio.timeout(_CHECK_S), self._client.stream("GET", url) as reply:
            return reply.status_code

    async def _try(self, body: bytes, read: Read, *, is_first: bool) -> Verdict:
        self._count("requests")
        if not is_first:
            self._count("retries")
        settings = self._settings
        url = settings.url if settings.model is None else f"{settings.url.rstrip('/')}/chat/completions"
        began_s = time.monotonic()
        try:
            headers = {"Content-Type": "application/json"}
            async with self._client.stream("POST", url, content=body, headers=headers) as reply:
                data = await _body(reply)
                status, after = reply.status_code, reply.headers.get("Retry-After", "")
        except httpx2.HTTPError as error:
            raise _FailedTry("does not answer", _named(error)) from None
        finally:
            self._count("request_s", time.monotonic() - began_s)
        text = data.decode("utf-8", "replace")
        if status == _RATE_LIMITED:
            self._count("rate_limited")
        if status != 200:
            after_s = float(after) if re.fullmatch(r"\d{1,6}(\.\d+)?", after) else 0.0
            how = _LIMITING if status == _RATE_LIMITED else "fails" if status in _AGAIN else "refuses"
            raise _FailedTry(how, f"status {status}: {self._safe(text)[:200]}", again=status in _AGAIN, after_s=after_s)
        try:
            return read(text)
        except UNREADABLE:
            raise _FailedTry(_UNREADABLE, f"{_UNREADABLE}: {self._safe(text)[:200]}") from None

    def _keep(self, content: bytes, verdict: Verdict) -> None:
        self._numbers[content] = verdict
        while len(self._numbers) > self._settings.cache_entries:
            self._numbers.popitem(last=False)

    async def _own_budget(self, name: str, limit: int) -> bool:
        self._spent[name] += 1
        return self._spent[name] <= limit

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counted(f"{self._name}:{name}", amount)

    def _spent_all(self) -> VerifierFailure:
        key = f"reward.endpoints.{self._name}.max_requests"
        error = f"{key} is {self._settings.max_requests}, and all are used; `headrace up --resume RUN --set {key}=N` raises it"
        return VerifierFailure(kind=VerifierFailureKind.BUDGET, error=error)

    def _failure(self, why: str, *, is_outage: bool = False) -> VerifierFailure:
        kind = VerifierFailureKind.OUTAGE if is_outage else VerifierFailureKind.UNREACHABLE
        return VerifierFailure(kind=kind, error=f"endpoint {self._name}: {self._safe(why)}")

    def _safe(self, text: str) -> str:
        """Mask the key in a text, also where JSON escapes it. Needs the whole text."""
        return self._key_in_text.sub("(the key)", text) if self._key else text


async def _body(reply: httpx2.Response) -> bytes:
    """Return a reply's body, at most ``_MAX_REPLY_BYTES`` as sent and unpacked. Raises _FailedTry
    if it is larger, or compressed with anything but gzip or deflate."""
    packed = reply.headers.get("Content-Encoding", "identity").strip().lower()
    if packed not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise _FailedTry(_UNREADABLE, f"a reply compressed with {packed[:40]}, which was not requested")
    unpack = None if packed in ("identity", "") else zlib.decompressobj(zlib.MAX_WBITS | 32)
    data, num_sent = bytearray(), 0
    async for part in reply.aiter_raw():
        num_sent += len(part)
        try:
            data += part if unpack is None else unpack.decompress(part, _MAX_REPLY_BYTES + 1 - len(data))
        except zlib.error as error:
            raise _FailedTry(_UNREADABLE, f"the reply is not valid {packed}: {error}") from None
        if max(len(data), num_sent) > _MAX_REPLY_BYTES:
            raise _FailedTry(_UNREADABLE, f"a reply of more than {_MAX_REPLY_BYTES} bytes")
    return bytes(data)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
