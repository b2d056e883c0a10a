"""Answers to the model's turns: what the environment says to a chunk that ends one, as tokens.

No state is kept here that matters: the conversation and the environment's own state travel with the chunks, so
another process can go on after a crash, with the same tokens."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.end_tokens import end_tokens, model_ends
from pipeline.data.prompt_form import CHAT_VARIABLES, MESSAGES
from pipeline.data.tokenizer import TextTokenizer
from pipeline.environments.contract import SAMPLED, TEXT, SampledTurn
from pipeline.environments.conversation import ChatFormat, Joint
from pipeline.environments.host import EpisodeCall, EpisodeReply
from pipeline.environments.processes import EnvironmentPool
from protocol.errors import ConfigError, DataError, EnvironmentFailed
from protocol.trajectory import Prompt, TrajectoryChunk, Turn, TurnRequest

_NO_TOKENS = np.empty(0, np.int32)


class Episode(msgspec.Struct, frozen=True, omit_defaults=True):
    """What travels as ``TurnRequest.state``: all that another worker needs to take the next turn."""

    messages: list[dict[str, Any]] = []
    """The conversation, with the model's messages."""
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of the tools that the chat template shows."""
    num_turns: int = 0
    """Of the model."""
    num_sequences: int = 1
    earlier: tuple[dict[str, Any], ...] = ()
    """The model's messages in conversations before this one."""
    digest: str = ""
    """Of what the environment said (``EpisodeReply.digest``)."""
    reward: float = 0.0
    state: dict[str, Any] | None = None
    """The environment's own."""
    is_verified: bool = False
    """Whether the row's verifier judges it, and not the environment."""
    wants_sampled: bool = False

    @property
    def actions(self) -> tuple[dict[str, Any], ...]:
        """The model's messages, oldest first, without turns of an assistant that a conversation began with."""
        count = self.num_turns - len(self.earlier)
        said = [message for message in self.messages if message["role"] == "assistant"]
        return (*self.earlier, *said[len(said) - count :])

    @property
    def is_text(self) -> bool:
        """Whether the model goes on with a text, without a chat template."""
        return self.messages[0]["role"] == TEXT

    def truncated(self, counts: dict[str, int] | None = None) -> Turn:
        """Return the end of a trajectory by a limit: not right, with its reward so far. Without an accuracy it gets
        the reward of a wrong answer, so that not to answer never pays more."""
        return _ended(self.reward, None if self.is_verified else 0.0, is_truncated=True, counts=counts)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Episode).decode


class TurnMaker:
    """Asks the environment, and writes its answers in the model's chat format."""

    def __init__(self, config: RunConfig, tokenizer: TextTokenizer, pool: EnvironmentPool) -> None:
        self._config, self._section, self._pool = config, config.environment, pool
        ends = model_ends(config.model.path, tokenizer)
        self._stops = frozenset(end_tokens(config.model.path, tokenizer, config.generation.stop_token_ids))
        self._chat = ChatFormat(tokenizer, ends, keep_thinking=self._section.keep_thinking)
        self._limit = config.generation.max_response_tokens
        self._longest = config.data.max_prompt_tokens + self._limit

    async def answer(self, chunk: TrajectoryChunk) -> Turn:
        """Return the environment's answer to a chunk that ends a turn, or to the opening one.

        A context that has no room for another turn ends the trajectory as truncated, with its reward so far. Raises
        EnvironmentFailed for a class that raises, hangs or returns nonsense."""
        try:
            return await (self._open(chunk) if chunk.is_opening else self._step(chunk))
        except (ConfigError, DataError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise EnvironmentFailed(traceback.format_exc()) from error

    async def _open(self, chunk: TrajectoryChunk) -> Turn:
        reply = await self._pool.answer(self._call(chunk))
        messages = list(reply.messages)
        opening = self._chat.opening(messages, reply.tools or (), self._variables(chunk))
        longest = self._config.data.max_prompt_tokens
        if len(opening.tokens) > longest:
            raise EnvironmentFailed(
                f"{self._section.name}.reset began a conversation of {len(opening.tokens)} tokens; expected at most {longest} "
                "(data.max_prompt_tokens): shorten its messages, or raise the limit"
            )
        episode = Episode(
            messages,
            reply.tools or (),
            reward=reply.reward,
            state=reply.state,
            digest=reply.digest,
            is_verified=reply.is_verified,
            wants_sampled=reply.wants_sampled,
        )
        return Turn(
            tokens=np.array(opening.tokens, np.int32),
            text=opening.text,
            asks=_asks(episode, reply),
            counts=reply.counts,
        )

    async def _step(self, chunk: TrajectoryChunk) -> Turn:
        assert not isinstance(chunk.asked, msgspec.UnsetType)
        asked, episode = chunk.asked, _decode(chunk.asked.state)
        said = [*chunk.context_tokens[chunk.turn_start :].tolist(), *chunk.tokens.tolist()]
        finish = self._finish(said, asked)
        if not finish:
            # the context is full in the middle of a turn; what was said so far is not an action
            await self._pool.end(str(chunk.trajectory))
            return episode.truncated()
        message = self._chat.parse(
            said, episode.tools, self._variables(chunk), stop_strings=asked.stop_strings, is_text=episode.is_text
        ).message
        if episode.wants_sampled:
            message[SAMPLED] = self._sampled(chunk, len(said), finish, logprobs=asked.whole)
        reply = await self._pool.answer(self._call(chunk, episode, message))
        episode = msgspec.structs.replace(
            episode,
            messages=[*episode.messages, message],
            num_turns=episode.num_turns + 1,
            reward=episode.reward + reply.reward,
            state=reply.state,
            digest=reply.digest,
        )
        if reply.is_done:
            return _ended(episode.reward, reply.accuracy, counts=reply.counts)
        if episode.num_turns >= self._section.max_turns:
            await self._pool.end(str(chunk.trajectory))
            return episode.truncated(reply.counts)
        if reply.restarts:
            tools = episode.tools if reply.tools is None else reply.tools
            following = self._chat.opening(reply.messages, tools, self._variables(chunk), joint=Joint.NEW_SEGMENT)
            episode = msgspec.structs.replace(episode, earlier=episode.actions, tools=tools, messages=[])
        else:
            following = self._chat.following(
                episode.messages,
                reply.messages,
                last_token=said[-1],
                tools=episode.tools,
                variables=self._variables(chunk),
            )
        if following.replaces:
            is_full = len(following.tokens) >= self._longest
        else:
            is_full = chunk.response_length + len(following.tokens) >= self._room(chunk)
        if is_full:
            await self._pool.end(str(chunk.trajectory))
            return episode.truncated(reply.counts)
        episode = msgspec.structs.replace(
            episode,
            messages=[*episode.messages, *reply.messages],
            num_sequences=episode.num_sequences + following.replaces,
        )
        return Turn(
            tokens=np.array(following.tokens, np.int32),
            text=following.text,
            asks=_asks(episode, reply),
            replaces=following.replaces,
            reward=episode.reward,
            accuracy=reply.accuracy,
            counts={**reply.counts, str(following.joint): 1},
        )

    def _finish(self, said: Sequence[int], asked: TurnRequest) -> str:
        """Return how the model's turn ended: ``stop``, ``length`` by its own limit, or nothing if the context ended it."""
        if said[-1] in self._stops or self._chat.completes(said, asked.stop_strings):
            return "stop"
        return "length" if asked.max_tokens and len(said) >= asked.max_tokens else ""

    def _sampled(self, chunk: TrajectoryChunk, num_tokens: int, finish: str, *, logprobs: bool) -> SampledTurn:
        pairs: list[tuple[str, float]] | None = None
        # of a turn in several windows, which a drain made, the earlier ones are not at hand
        if logprobs and num_tokens == chunk.num_tokens:
            pairs = [
                (self._chat.text_of(token), float(logprob))
                for token, logprob in zip(chunk.tokens.tolist(), chunk.behavior_logprobs.tolist(), strict=True)
            ]
        num_context = int(chunk.prompt.tokens.size) + chunk.response_length - num_tokens
        return SampledTurn(finish=finish, num_context=num_context, num_tokens=num_tokens, logprobs=pairs)

    def _room(self, chunk: TrajectoryChunk) -> int:
        """Return the most tokens that a context may have after the chunk's prompt."""
        return min(self._limit, self._longest - chunk.prompt.tokens.size)

    def _variables(self, chunk: TrajectoryChunk) -> dict[str, Any]:
        return chunk.prompt.extra.get(CHAT_VARIABLES) or self._config.data.chat_variables

    def _call(
        self, chunk: TrajectoryChunk, episode: Episode | None = None, action: dict[str, Any] | None = None
    ) -> EpisodeCall:
        return EpisodeCall(
            number=0,
            episode=str(chunk.trajectory),
            row=row_of(chunk.prompt),
            actions=episode.actions if episode else (),
            state=episode.state if episode else None,
            digest=episode.digest if episode else "",
            action=action,
        )


def _asks(episode: Episode, reply: EpisodeReply) -> TurnRequest:
    return TurnRequest(
        state=_encode(episode),
        sequence=episode.num_sequences - 1,
        max_tokens=reply.max_tokens,
        stop_strings=reply.stop,
        whole=reply.logprobs,
    )


def _ended(
    reward: float, accuracy: float | None, *, is_truncated: bool = False, counts: dict[str, int] | None = None
) -> Turn:
    return Turn(
        tokens=_NO_TOKENS,
        is_done=True,
        is_truncated=is_truncated,
        reward=reward,
        accuracy=accuracy,
        counts=counts or {},
    )


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the row as ``reset`` gets it: its own columns, ``messages``, ``answer`` and ``prompt_id``."""
    columns = {name: value for name, value in prompt.extra.items() if name not in (MESSAGES, CHAT_VARIABLES)}
    # not of the prompt's text, which is the whole conversation's once the trajectory has begun
    return columns | {
        "messages": prompt.extra.get(MESSAGES, []),
        "answer": prompt.answer,
        "prompt_id": prompt.prompt_id,
    }
