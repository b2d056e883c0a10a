"""What all generation engines do with windows: check requests, find stop strings, build segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from protocol.errors import EngineError
from protocol.trajectory import Segment
from workers.engines.generation.seam import WindowRequest

if TYPE_CHECKING:
    from pipeline.data.tokenizer import TextTokenizer


_MARGIN = 16
"""Characters at the start of a tail that may differ from the whole text's: decoders treat a text's
first token specially."""
_LEAST = 32
"""A tail of fewer tokens is not cut."""
_MOST_BROKEN = 512
"""A longer tail, in tokens, is cut even in the middle of a character."""
_BROKEN = "\ufffd"


class StopSearch:
    """Looks for stop strings in one response, token by token."""

    def __init__(self, stop_strings: tuple[str, ...], tokenizer: TextTokenizer, earlier: Iterable[int]) -> None:
        """Start after the ``earlier`` response tokens, whose text contains no stop string."""
        self._stop_strings = stop_strings
        self._tokenizer = tokenizer
        self._reach = max(map(len, stop_strings)) - 1 + _MARGIN
        self._tail = [token for token in earlier if tokenizer.has_text(token)]
        self._text = tokenizer.decode(self._tail)
        self._try_at = _LEAST
        self.num_tokens = 0
        self.end: int | None = None
        """Number of these that belong to the response; None while it continues."""
        while self._cut():
            pass

    def feed(self, tokens: Iterable[int]) -> int | None:
        for token in tokens:
            if self.end is not None:
                break
            self.num_tokens += 1
            if self._is_end(token):
                self.end = self.num_tokens
        return self.end

    def _is_end(self, token: int) -> bool:
        if not self._tokenizer.has_text(token):
            return False
        self._tail.append(token)
        before, self._text = self._text, self._tokenizer.decode(self._tail)
        # a token may complete a character, which changes the text before it
        pairs = enumerate(zip(before, self._text, strict=False))
        old = next((at for at, (one, other) in pairs if one != other), min(len(before), len(self._text)))
        if any(self._text.find(stop, max(0, old - len(stop) + 1)) >= 0 for stop in self._stop_strings):
            return True
        if len(self._tail) >= self._try_at:
            self._cut()
        return False

    def _cut(self) -> bool:
        """Drop the first half of the tail if the remaining text does not depend on it."""
        self._try_at = len(self._tail) + _LEAST
        rest = self._tail[len(self._tail) // 2 :]
        text = self._tokenizer.decode(rest)
        is_whole = _BROKEN not in text or len(rest) > _MOST_BROKEN
        is_enough = len(self._tail) >= _LEAST and len(text) >= self._reach
        if not (is_whole and is_enough and self._text.endswith(text[_MARGIN:])):
            return False
        self._tail, self._text = rest, text
        self._try_at = max(_LEAST, 2 * len(rest))
        return True


def stop_search(request: WindowRequest, tokenizer: TextTokenizer | None) -> StopSearch:
    """Start the search for a request with stop strings. Raises EngineError without a tokenizer."""
    if tokenizer is None:
        raise EngineError(
            f"{request.trajectory} has stop strings {', '.join(map(repr, request.stop_strings))}, but the engine has no "
            "tokenizer; build it with one, or request no stop strings"
        )
    return StopSearch(request.stop_strings, tokenizer, request.response_tokens[request.text_start :].tolist())


def text_to_stop(text: str, stop_strings: Iterable[str]) -> str:
    ends = [at + len(stop) for stop in stop_strings if (at := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def check_request(request: WindowRequest, *, positions: int | None, vocabulary: int) -> None:
    """Raise EngineError unless a request fits a model's positions (None for any) and vocabulary."""
    name, used = str(request.trajectory), request.response_tokens.size
    wanted = request.prompt_tokens.size + request.max_response_tokens
    if request.prompt_tokens.size == 0:
        raise EngineError(f"{name} has an empty prompt; at least one token must precede the sampled ones")
    if request.window_tokens < 1 or used >= request.max_response_tokens:
        raise EngineError(
            f"{name} needs a window of {request.window_tokens} tokens after {used} of at most "
            f"{request.max_response_tokens}; there must be room for one token"
        )
    if positions is not None and wanted > positions:
        raise EngineError(
            f"{name} may need {wanted} positions (prompt {request.prompt_tokens.size}, response up to "
            f"{request.max_response_tokens}), but the model has {positions}; lower generation.max_response_tokens or "
            "data.max_prompt_tokens"
        )
    for tokens in (request.prompt_tokens, request.response_tokens):
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise EngineError(
                f"{name} has token ids from {tokens.min()} to {tokens.max()}, but the model knows 0 to "
                f"{vocabulary - 1}; tokenizer and model do not belong together"
            )


def is_live_already(request: WindowRequest) -> EngineError:
    message = f"{request.trajectory} is live already; wait for its window, or forget it, before submitting it again"
    return EngineError(message)


def segments(versions: Sequence[tuple[int, int]], length: int) -> tuple[Segment, ...]:
    """Split tokens up to ``length`` by policy version; ``versions`` are (begin, version)."""
    ends = [begin for begin, _ in versions[1:]] + [length]
    runs: list[Segment] = []
    for (begin, version), end in zip(versions, ends, strict=True):
        if end == begin:
            continue
        if runs and runs[-1].policy_version == version:
            runs[-1] = Segment(version, runs[-1].num_tokens + end - begin)
        else:
            runs.append(Segment(version, end - begin))
    return tuple(runs)
