"""Windows in every generation engine: requests are checked, tokens cut into segments."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import EngineError
from protocol.trajectory import Segment
from workers.engines.generation.seam import WindowRequest


def check_request(request: WindowRequest, *, positions: int | None, vocabulary: int) -> None:
    """Raise EngineError unless a request fits a model's positions (None: any) and vocabulary."""
    name, used = str(request.trajectory), request.response_tokens.size
    wanted = request.prompt_tokens.size + request.max_response_tokens
    if request.prompt_tokens.size == 0:
        raise EngineError(f"{name} has an empty prompt; at least one token must precede what is sampled")
    if request.window_tokens < 1 or used >= request.max_response_tokens:
        raise EngineError(
            f"{name} needs a window of {request.window_tokens} tokens after {used} of at most "
            f"{request.max_response_tokens}; there must be room for one token"
        )
    if positions is not None and wanted > positions:
        raise EngineError(
            f"{name} may need {wanted} positions (prompt {request.prompt_tokens.size}, response up to "
            f"{request.max_response_tokens}), the model has {positions}; lower generation.max_response_tokens or "
            "data.max_prompt_tokens"
        )
    for tokens in (request.prompt_tokens, request.response_tokens):
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise EngineError(
                f"{name} has token ids from {tokens.min()} to {tokens.max()}, the model knows 0 to "
                f"{vocabulary - 1}; tokenizer and model do not belong together"
            )


def is_live_already(request: WindowRequest) -> EngineError:
    """Return the error of a trajectory that is submitted while it is live."""
    message = f"{request.trajectory} is live already; wait for its window, or forget it, before submitting it again"
    return EngineError(message)


def segments(versions: Sequence[tuple[int, int]], length: int) -> tuple[Segment, ...]:
    """Return the runs of one version up to ``length``; ``versions`` are (begin, version)."""
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
