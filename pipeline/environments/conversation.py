"""Tokens in, tokens out: what the model sampled is never tokenised again.

    prompt    what the chat template writes for the opening messages, up to where the model begins
    sampled   the model's turn, with or without the token that ends a turn
    given     what the template writes after a turn for the new messages, up to where the model begins again

``given`` comes from a small made-up conversation whose assistant's turn is known, so it needs no look at the sampled
text. Where the template would now write earlier turns in another way, most often without their thinking, the turns so
far are written again by the template and take the place of the whole context (``replaces``).

Templates differ in more than marks: whether they strip thinking, know the role ``tool``, write tool calls and the
tools' schemas, and want arguments as JSON. A probe with made-up conversations finds out, once for each combination of
template variables; what a template lacks is made up for in the messages that it gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from pipeline.data.tokenizer import TextTokenizer
from pipeline.environments.contract import TEXT, ChatMessage
from pipeline.environments.tool_calls import CallAttempt, CallStatus, attempted_calls
from protocol.errors import DataError

Messages = Sequence[Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]

WRITTEN: Final = "written_text"
"""Key in an assistant's message with tool calls: the answer as written, with its calls."""
BAD_CALLS: Final = "bad_calls"
"""Key in an assistant's message: the calls that cannot be read, ``{"id", "status", "name"}``. Ids count all calls of
the turn."""
THINKING: Final = "reasoning_content"
"""Key in an assistant's message: its thinking, if there is any."""


class Joint(StrEnum):
    """How the environment's tokens follow the model's."""

    CLEAN = "clean"
    """at once: the model ended its turn"""
    BRIDGED = "bridged"
    """after the template's end of a turn, which the model did not write, or although the template would write
    earlier turns in another way now"""
    NEW_SEGMENT = "new_segment"
    """they replace the whole context"""


@dataclass(frozen=True, slots=True)
class Given:
    """Text and tokens that the model did not sample."""

    text: str
    tokens: list[int]
    joint: Joint = Joint.CLEAN

    @property
    def replaces(self) -> bool:
        """Whether the tokens take the place of the whole context."""
        return self.joint is Joint.NEW_SEGMENT


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    message: ChatMessage
    """For the environment: role, content, and if there are any ``reasoning_content``, ``tool_calls`` and
    ``bad_calls``, which are left in the content too."""
    calls: tuple[CallAttempt, ...]
    """Every attempt at a tool call, in order."""


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template does, found by a probe."""

    opens_thinking: bool = False
    """The prompt ends within ``<think>``."""
    takes_thinking: bool = False
    """It writes ``reasoning_content``; otherwise thinking is part of the content."""
    has_tool_role: bool = True
    """It writes messages of the role ``tool``; otherwise they become a user message."""
    writes_calls: bool = True
    """It writes ``tool_calls``; otherwise they are part of the content."""
    arguments_as_text: bool = False
    """It wants a call's arguments as JSON text."""
    writes_tools: bool = True
    """It describes the tools; otherwise the first message does."""
    bare_json: bool = False
    """A tool call is a JSON object without any mark."""
    drops: frozenset[str] = frozenset()
    """After which messages something that was said in earlier turns is no longer written: ``tool``, ``user``, and the
    same with ``+thinking`` if turns with thinking are."""
    shifts: frozenset[str] = frozenset()
    """The same where only marks or the tools' descriptions of earlier turns change."""


_END_THINKING = "</think>"
_NO_THINKING = re.compile(r"<think>\s*(</think>)?\s*\Z")
_MARK = "headrace"
_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string", "description": "Value."}}},
    },
}
_ASK: Final = {"role": "user", "content": "headrace-asks"}
_SAID, _THOUGHT, _BESIDE = "headrace-said", "headrace-thought", "headrace-beside"
_RESULT: Final = {
    "role": "tool",
    "content": "headrace-result",
    "name": _TOOL["function"]["name"],
    "tool_call_id": "call00000",
}
_INSTRUCTIONS = (
    'You may call a tool by writing <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>. The result comes in '
    "the next message. The tools are:\n{}"
)


class ChatFormat:
    """Conversations in a model's chat template. Made once for a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, ends: Collection[int] = (), *, keep_thinking: bool = False) -> None:
        """``ends``: the ids that end a response (``end_tokens``). ``keep_thinking``: earlier turns stay as they
        were sampled, also where the template would write them in another way. Raises DataError if the tokenizer has
        no usable chat template."""
        if not tokenizer.has_chat_template:
            raise DataError(
                "environments need a chat template, and the model's tokenizer has none; add chat_template.jinja to the "
                "model folder"
            )
        self._tokenizer, self._keep_thinking = tokenizer, keep_thinking
        named = {*ends, *(end for end in (tokenizer.turn_end_id, tokenizer.eos_token_id) if end is not None)}
        self._ends = frozenset(named)
        texts = (tokenizer.decode([end], skip_special_tokens=False) for end in sorted(named))
        self._end_texts = {text: tokenizer.token_id(text) for text in texts if text}
        self._facts = lru_cache(maxsize=64)(self._probe)
        self.facts()

    def facts(self, tools: Schemas = (), variables: Variables | None = None) -> TemplateFacts:
        """Return what the template does with these variables. Raises DataError if it rejects every conversation."""
        return self._facts(bool(tools), json.dumps(variables or {}, sort_keys=True))

    def opening(
        self,
        messages: Messages,
        tools: Schemas = (),
        variables: Variables | None = None,
        *,
        joint: Joint = Joint.CLEAN,
    ) -> Given:
        """Return the prompt. Raises DataError if the template rejects the messages."""
        if messages[0]["role"] == TEXT:
            text = messages[0]["content"]
            return Given(text, self._tokenizer.encode(text), joint)
        text = self._render(messages, tools, variables, self.facts(tools, variables))
        return Given(text, self._encode(text), joint)

    def text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def completes(self, tokens: Sequence[int], stop_strings: Sequence[str]) -> bool:
        """Return whether the text of a turn contains one of the strings."""
        return bool(stop_strings) and any(stop in self._tokenizer.decode(list(tokens)) for stop in stop_strings)

    def parse(
        self,
        tokens: Sequence[int],
        tools: Schemas = (),
        variables: Variables | None = None,
        *,
        stop_strings: Sequence[str] = (),
        is_text: bool = False,
    ) -> AssistantTurn:
        """Read the tokens that the model sampled in one turn, with or without an end token, up to a stop string.
        ``is_text``: they go on with a text, so there are neither thinking nor calls to be found."""
        body = tokens[:-1] if len(tokens) and tokens[-1] in self._ends else tokens
        text = self._tokenizer.decode([int(token) for token in body], skip_special_tokens=False)
        text = text[: min((at for stop in stop_strings if (at := text.find(stop)) >= 0), default=len(text))]
        if is_text:
            return AssistantTurn({"role": "assistant", "content": text}, ())
        facts = self.facts(tools, variables)
        thinking, answer = split_thinking(text, is_open=facts.opens_thinking)
        content, calls = attempted_calls(answer, tools, bare_json=facts.bare_json)
        good = [call for call in calls if call.status is CallStatus.OK]
        message: ChatMessage = {"role": "assistant", "content": content if len(good) == len(calls) else answer}
        if thinking:
            message[THINKING] = thinking
        if good:
            message["tool_calls"] = [
                {
                    "id": call_id(number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(calls)
                if call.status is CallStatus.OK
            ]
            message[WRITTEN] = answer
        if len(good) < len(calls):
            message[BAD_CALLS] = [
                {"id": call_id(number), "status": str(call.status), "name": call.name}
                for number, call in enumerate(calls)
                if call.status is not CallStatus.OK
            ]
        return AssistantTurn(message, tuple(calls))

    def following(
        self,
        messages: Messages,
        new: Messages,
        *,
        last_token: int | None,
        tools: Schemas = (),
        variables: Variables | None = None,
    ) -> Given:
        """Return what comes after the model's turn.

        ``messages`` is the conversation so far, which ends with the parsed turn of the model; ``new`` what the
        environment says. ``last_token`` is the last one that the model sampled in its turn, None if there was none.
        Raises DataError if the template rejects the messages."""
        if new[0]["role"] == TEXT:
            return Given(text := new[0]["content"], self._encode(text))
        facts = self.facts(tools, variables)
        kind = "tool" if all(message["role"] == "tool" for message in new) else "user"
        key = f"{kind}+thinking" if _has_thinking(messages) else kind
        if key in facts.drops and not self._keep_thinking:
            return self._again([*messages, *new], tools, variables, facts)
        lead, end, rest = self._after_turn(new, tools, variables, facts)
        given = self._joined(lead, end, rest, last_token)
        return replace(given, joint=Joint.BRIDGED) if key in facts.drops | facts.shifts else given

    def _again(self, messages: Messages, tools: Schemas, variables: Variables | None, facts: TemplateFacts) -> Given:
        try:
            text = self._render(messages, tools, variables, facts)
        except DataError:
            # such as two calls in one turn (Llama)
            text = self._render(messages, tools, variables, replace(facts, writes_calls=False))
        return Given(text, self._encode(text), Joint.NEW_SEGMENT)

    def _joined(self, lead: str, end: str, rest: str, last_token: int | None) -> Given:
        end_id = self._end_texts.get(end)
        if end_id is None:
            tokens = self._encode(rest)
            first = tokens[0] if tokens else None
            # a mark of the next message may end a turn (GLM)
            if first == last_token and first in self._ends:
                return Given(rest.removeprefix(self._tokenizer.decode([first], skip_special_tokens=False)), tokens[1:])
            is_clean = last_token not in self._ends and first not in self._ends
            return Given(rest, tokens, Joint.CLEAN if is_clean else Joint.BRIDGED)
        if last_token == end_id:
            # after the end token, because some tokens swallow the space beside them
            tokens = self._encode(end + rest)
            return Given(rest, tokens[1:] if tokens[0] == end_id else self._encode(rest))
        text = lead + end + rest
        return Given(text, self._encode(text), Joint.BRIDGED)

    def _after_turn(
        self, new: Messages, tools: Schemas, variables: Variables | None, facts: TemplateFacts
    ) -> tuple[str, str, str]:
        """Return what the template writes after an assistant's turn: before its end token, that token's text (empty
        if it has none) and up to where the model begins again."""
        mark = _MARK
        while mark in json.dumps(list(new)):
            mark += "x"
        asked = [message for message in new if message["role"] == "tool"] if new[0]["role"] == "tool" else []
        is_call = bool(asked) and facts.writes_calls and facts.has_tool_role
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        if is_call:
            before[1] = _call_turn(mark, asked)
        try:
            text = self._render([*before, *new], tools, variables, facts)
        except DataError:
            if len(asked) < 2:
                raise
            # Llama's template takes one call a turn
            before[1] = _call_turn(mark, asked[:1])
            text = self._render([*before, *new], tools, variables, facts)
        _, found, tail = text.rpartition(mark)
        if not found:
            raise DataError("the chat template leaves out the assistant's turns; no conversation can go on")
        _, _, alone = self._render(before, tools, variables, facts, prompt=False).rpartition(mark)
        common = tail[: _num_common(tail, alone)]
        places = [(at, -len(text), text) for text in self._end_texts if (at := common.find(text)) >= 0]
        if not places:
            # of a call, its closing marks are the model's
            return "", "", tail[len(common) :] if is_call else tail
        at, _, end = min(places)
        return "" if is_call else tail[:at], end, tail[at + len(end) :]

    def _render(
        self,
        messages: Messages,
        tools: Schemas,
        variables: Variables | None,
        facts: TemplateFacts,
        *,
        prompt: bool = True,
    ) -> str:
        fitted = _fitted(messages, tools, facts)
        return self._tokenizer.apply_chat_template(fitted, variables, tools=tools, add_generation_prompt=prompt)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _probe(self, has_tools: bool, variables_text: str) -> TemplateFacts:
        variables, tools = json.loads(variables_text), [_TOOL] if has_tools else []

        def written(messages: Messages, facts: TemplateFacts, *, prompt: bool = True) -> str:
            try:
                return self._render(messages, tools, variables, facts, prompt=prompt)
            except DataError:
                return ""

        prompt = self._render([_ASK], tools, variables, TemplateFacts())
        facts = TemplateFacts(
            opens_thinking=prompt.rstrip().endswith("<think>"),
            writes_tools=not has_tools or _TOOL["function"]["name"] in prompt,
        )
        takes, turn = replace(facts, takes_thinking=True), {"role": "assistant", "content": _SAID, THINKING: _THOUGHT}
        with_call = [_ASK, _call_turn(_SAID, [_RESULT]) | {THINKING: _THOUGHT}, _RESULT]
        if _THOUGHT in written([_ASK, turn], takes, prompt=False) + written(with_call, takes):
            facts = takes
        called = [_ASK, _call_turn(_SAID, [_RESULT])]
        facts = replace(facts, writes_calls=False)
        for as_text in (False, True):
            tried = replace(facts, writes_calls=True, arguments_as_text=as_text)
            if _SAID in (call := written(called, tried, prompt=False)):
                facts = replace(tried, bare_json=_is_bare(call))
                break
        if _RESULT["content"] not in written([*called, _RESULT], facts):
            facts = replace(facts, has_tool_role=False)
        kinds = {
            f"{kind}+thinking" if thinking else kind: _change(kind, thinking, lambda messages: written(messages, facts))
            for kind in ("tool", "user")
            for thinking in (False, True)
        }
        drops, shifts = (
            frozenset(key for key in kinds if kinds[key] is how) for how in (_Change.DROPS, _Change.SHIFTS)
        )
        return replace(facts, drops=drops, shifts=shifts)


class _Change(Enum):
    NONE = auto()
    SHIFTS = auto()
    DROPS = auto()


def _change(kind: str, thinking: bool, written: Callable[[Messages], str]) -> _Change:
    """Return how a template changes what it has written before, once there are one and two further turns."""
    turn = _call_turn(_SAID, [_RESULT]) if kind == "tool" else {"role": "assistant", "content": _SAID}
    new = _RESULT if kind == "tool" else {**_RESULT, "role": "user"}
    words = [_SAID, _RESULT["content"]]
    if thinking:
        turn[THINKING] = _THOUGHT
        # a template that writes nothing beside calls does not strip thinking (Llama, Mistral)
        beside = written([_ASK, {**turn, "content": _BESIDE}, new])
        words += [_THOUGHT] if kind == "user" or _BESIDE in beside else []
    texts = [written([_ASK, *[turn, new] * turns]) for turns in range(3)]
    for turns, text in enumerate(texts):
        if not text or any(text.count(word) < turns for word in words):
            return _Change.DROPS
    # thinking that a prompt opens may be left out later
    opened = [_NO_THINKING.search(text) for text in texts]
    begins = [text[: found.start()] if found else text for text, found in zip(texts, opened, strict=True)]
    is_kept = all(after.startswith(before) for before, after in pairwise(begins))
    return _Change.NONE if is_kept else _Change.SHIFTS


def split_thinking(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """Return the thinking at a text's beginning, and the answer after it. ``is_open``: the prompt has written
    ``<think>`` already. Thinking that never ends leaves no answer."""
    if text.lstrip().startswith("<think>"):
        text = text.lstrip().removeprefix("<think>")
    elif not is_open:
        return "", text.strip()
    thinking, _, answer = text.partition(_END_THINKING)
    return thinking.strip(), answer.strip()


def call_id(number: int) -> str:
    """Return the id of a turn's tool call; nine letters and digits, as Mistral's template wants."""
    return f"call{number:05d}"


def _has_thinking(messages: Messages) -> bool:
    """Return whether a turn since the last user message has thinking; what came before was written again then."""
    for message in reversed(messages):
        if message["role"] == "user":
            return False
        if message["role"] == "assistant" and (message.get(THINKING) or _END_THINKING in str(message.get("content"))):
            return True
    return False


def _call_turn(mark: str, answers: Messages) -> ChatMessage:
    """Return a turn of made-up calls, one for each message with a result."""
    calls = [
        {
            "id": answer.get("tool_call_id") or call_id(number),
            "type": "function",
            "function": {"name": answer.get("name") or "probe_tool", "arguments": {"value": mark}},
        }
        for number, answer in enumerate(answers)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _is_bare(call: str) -> bool:
    """Return whether a call that the template wrote is only JSON."""
    _, _, turn = call.partition(_ASK["content"])
    return not attempted_calls(turn)[1] and '"parameters"' in turn


def _fitted(messages: Messages, tools: Schemas, facts: TemplateFacts) -> list[ChatMessage]:
    """Return messages with what the template would leave out in a form that it writes."""
    fitted: list[ChatMessage] = []
    for message in map(dict, messages):
        if message["role"] == "assistant":
            fitted.append(_fitted_turn(message, facts))
        elif message["role"] == "tool" and not facts.has_tool_role:
            if fitted and fitted[-1].get("of_tools"):
                fitted[-1]["content"] += f"\n{message['content']}"
            else:
                fitted.append({"role": "user", "content": message["content"], "of_tools": True})
        elif (
            fitted and fitted[-1].get("of_tools") and message["role"] == "user" and isinstance(message["content"], str)
        ):
            fitted[-1]["content"] += f"\n{message['content']}"
        else:
            fitted.append(message)
    if tools and not facts.writes_tools and fitted:
        told = _INSTRUCTIONS.format("\n".join(json.dumps(tool.get("function", tool)) for tool in tools))
        content = fitted[0]["content"]
        added = (
            [{"type": "text", "text": f"{told}\n\n"}, *content] if isinstance(content, list) else f"{told}\n\n{content}"
        )
        fitted[0] = {**fitted[0], "content": added}
    return fitted


def _fitted_turn(message: ChatMessage, facts: TemplateFacts) -> ChatMessage:
    message.pop(BAD_CALLS, None)
    written, calls = message.pop(WRITTEN, None), message.get("tool_calls")
    if calls and not facts.writes_calls:
        del message["tool_calls"]
        message["content"] = _with_calls(message, calls) if written is None else written
    elif calls and facts.arguments_as_text:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    if (thinking := message.get(THINKING)) and not facts.takes_thinking:
        del message[THINKING]
        message["content"] = f"<think>\n{thinking}\n{_END_THINKING}\n\n{message.get('content') or ''}"
    return message


def _with_calls(message: ChatMessage, calls: Sequence[Mapping[str, Any]]) -> str:
    texts = [f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in calls]
    return "\n".join(filter(None, [message.get("content"), *texts]))


def _num_common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at the beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
