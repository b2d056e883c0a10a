"""A judge behind an OpenAI-compatible endpoint, or a reward of your own behind HTTP.

One pool of connections, with a limit of requests in flight. A judgement has one deadline over all
of its tries. An endpoint that is down, limits the rate or replies with something unreadable is
tried again until then. After it the response fails, and is never wrong. Numbers are kept by the
content of their request, a bounded number of them. The key comes from the environment; no error
repeats it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from pipeline.config.judging import EndpointSection
from pipeline.process import work
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome
from protocol.errors import ConfigError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_CHECK_S = 5.0
_BEAT_S = 10.0
_MAX_REPLY_BYTES = 1 << 20
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""
_SCORE = re.compile(r"score\W{0,8}(-?\d+(?:\.\d+)?)", re.IGNORECASE)


class _FailedTry(Exception):
    """A try failed."""

    def __init__(self, why: str, *, again: bool = True, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.again, self.after_s = again, after_s


class HttpJudge:
    """One endpoint of ``reward.endpoints``."""

    def __init__(self, name: str, settings: EndpointSection) -> None:
        """Open no connection yet."""
        self._name, self._settings = name, settings
        self._key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        limits = httpx2.Limits(max_connections=settings.max_in_flight, max_keepalive_connections=settings.max_in_flight)
        self._client = httpx2.AsyncClient(
            limits=limits,
            timeout=settings.timeout_s,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
        )
        self._room = asyncio.Semaphore(settings.max_in_flight)
        self._numbers: OrderedDict[bytes, Verdict] = OrderedDict()
        self.num_requests = 0

    async def check(self) -> None:
        """Look for the endpoint before anything starts. Raises ConfigError: it does not answer,
        refuses the key, or the key's variable is not set."""
        where = f"reward.endpoints.{self._name}"
        if self._settings.api_key_env and not self._key:
            raise ConfigError(f"{where}.api_key_env names {self._settings.api_key_env}, which is not set; export it")
        url = self._settings.url.rstrip("/")
        try:
            found = await self._client.get(url if self._settings.model is None else f"{url}/models", timeout=_CHECK_S)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConfigError(
                f"{where}: {url} does not answer ({_named(error)}); start it, or correct its url"
            ) from None
        if found.status_code in (401, 403):
            raise ConfigError(
                f"{where}: {url} refuses the key, with status {found.status_code}; set {where}.api_key_env"
            )

    async def judge(self, response: Response) -> VerifierOutcome:
        """Return a number for one response; a failure when there is none by the deadline."""
        body = self._body(response)
        content = hashlib.sha256(body).digest()
        if content in self._numbers:
            self._numbers.move_to_end(content)
            return self._numbers[content]
        why = "no try ended"
        # those in front have deadlines of their own
        async with self._room:
            try:
                async with asyncio.timeout(self._settings.timeout_s), _beating():
                    pause_s = _FIRST_PAUSE_S
                    while True:
                        if self._settings.max_requests is not None and self.num_requests >= self._settings.max_requests:
                            return self._spent()
                        try:
                            verdict = await self._try(body)
                        except _FailedTry as error:
                            why = str(error)
                            if not error.again:
                                return self._failure(why)
                            await asyncio.sleep(max(error.after_s, pause_s * random.uniform(0.5, 1.0)))
                            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                            continue
                        self._keep(content, verdict)
                        return verdict
            except TimeoutError:
                return self._failure(f"no number within {self._settings.timeout_s:g} s; the last try: {why}")

    async def aclose(self) -> None:
        """Close the connections. Repeated calls do nothing."""
        await self._client.aclose()

    async def _try(self, body: bytes) -> Verdict:
        self.num_requests += 1
        settings = self._settings
        url = settings.url if settings.model is None else f"{settings.url.rstrip('/')}/chat/completions"
        try:
            headers = {"Content-Type": "application/json"}
            async with self._client.stream("POST", url, content=body, headers=headers) as reply:
                data = bytearray()
                async for part in reply.aiter_bytes():
                    data += part
                    if len(data) > _MAX_REPLY_BYTES:
                        raise _FailedTry(f"a reply of more than {_MAX_REPLY_BYTES} bytes")
                status, after = reply.status_code, reply.headers.get("Retry-After", "")
        except httpx2.HTTPError as error:
            raise _FailedTry(_named(error)) from None
        text = data.decode("utf-8", "replace")
        if status != 200:
            after_s = float(after) if re.fullmatch(r"\d{1,6}(\.\d+)?", after) else 0.0
            raise _FailedTry(f"status {status}: {text[:200]}", again=status in _AGAIN, after_s=after_s)
        try:
            told = json.loads(text)
            return self._number(told) if settings.model is None else self._score(told)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise _FailedTry(f"a reply without a number: {text[:200]}") from None

    def _body(self, response: Response) -> bytes:
        if self._settings.model is None:
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
        prompt = re.sub(r"\{(prompt|answer|response)\}", lambda found: texts[found[1]], self._settings.prompt)
        request: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": self._settings.max_reply_tokens,
        }
        return json.dumps(request).encode()

    def _number(self, told: Any) -> Verdict:
        """Read ``{"scores": [number]}``."""
        (number,) = told["scores"]
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(number)
        return Verdict(accuracy=float(number))

    def _score(self, told: Any) -> Verdict:
        """Read the judge's last `Score: N`."""
        content = told["choices"][0]["message"]["content"]
        number = float(_SCORE.findall(content)[-1]) / self._settings.scale
        if not 0.0 <= number <= 1.0:
            raise ValueError(number)
        return Verdict(accuracy=number, reason=content.strip()[-200:])

    def _keep(self, content: bytes, verdict: Verdict) -> None:
        self._numbers[content] = verdict
        while len(self._numbers) > self._settings.cache_entries:
            self._numbers.popitem(last=False)

    def _spent(self) -> VerifierFailure:
        error = (
            f"reward.endpoints.{self._name}.max_requests is {self._settings.max_requests}, and all are spent; raise it, and go "
            "on with `headrace up --resume RUN`"
        )
        return VerifierFailure(kind=VerifierFailureKind.BUDGET, error=error)

    def _failure(self, why: str) -> VerifierFailure:
        if self._key:
            why = why.replace(self._key, "(the key)")
        return VerifierFailure(kind=VerifierFailureKind.UNREACHABLE, error=f"endpoint {self._name}: {why}")


@contextlib.asynccontextmanager
async def _beating() -> AsyncIterator[None]:
    """Report a finished piece of work now and then: a wait with a deadline is no standstill."""
    async with asyncio.TaskGroup() as tasks:
        beat = tasks.create_task(_beat())
        try:
            yield
        finally:
            beat.cancel()


async def _beat() -> None:
    while True:
        await asyncio.sleep(_BEAT_S)
        work.step()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
