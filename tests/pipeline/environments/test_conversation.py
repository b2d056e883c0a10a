"""Tokens in, tokens out, over the chat templates of twelve families: what was sampled is never tokenised again."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pipeline.environments.conversation import THINKING, WRITTEN, ChatFormat, Given, Joint, call_id, split_thinking
from protocol.errors import DataError
from tests.pipeline.environments.families import FAMILIES, family_ends, family_tokenizer

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}
PER_FAMILY = 84
"""Conversations of each family: 1,008 together."""
THINK = ("qwen3", "deepseek-v3", "deepseek-r1", "glm")
KEEPS_TOOL_ROLE = [name for name in FAMILIES if name not in ("gemma", "phi3", "phi4")]


def chat_format(name: str, **settings: Any) -> ChatFormat:
    return ChatFormat(family_tokenizer(name), family_ends(name), **settings)


class Words:
    """Random words, none of them twice, of which the tokenizer makes several tokens."""

    def __init__(self, seed: int) -> None:
        self.rng, self.number = random.Random(seed), 0

    def word(self) -> str:
        self.number += 1
        return "w" + "".join(self.rng.choices("aeiou", k=4)) + str(self.number) + "w"

    def text(self) -> str:
        return " ".join([self.word(), *self.rng.sample(["so", "the sum", "+", "is five.", "{", "look!"], 3)])


def end_of(name: str, turn: str) -> int:
    """Return what the model samples at the end of a turn; of GLM, the mark of the next message."""
    end = FAMILIES[name].end or ("<|observation|>" if turn == "tool" else "<|user|>")
    token = family_tokenizer(name).token_id(end)
    assert token is not None
    return token


def some_sampled(name: str, words: Words, *, call: bool, thinks: bool) -> tuple[list[int], list[str]]:
    """Return random tokens of a turn without its end, with the words in it that come up nowhere else."""
    tokenizer, rng = family_tokenizer(name), words.rng
    said = [words.word() for _ in range(rng.randint(1, 3))]
    text = " ".join(said)
    if call:
        text += f'\n<tool_call>\n{{"name": "add", "arguments": {{"value": "{words.word()}"}}}}\n</tool_call>'
    thought = f"<think>\n{words.word()}\n</think>\n\n" if thinks else ""
    # a character or two at a time: never as the tokenizer would cut it
    tokens = tokenizer.encode(thought, add_special_tokens=False)
    while text:
        size = rng.randint(1, 2)
        tokens += tokenizer.encode(text[:size], add_special_tokens=False)
        text = text[size:]
    plain = [token for token in range(tokenizer.num_tokens) if tokenizer.has_text(token)]
    # any bytes: also what is no text
    return tokens + rng.choices(plain, k=rng.randint(0, 4)), said


def some_answer(words: Words, turn: str) -> list[dict[str, Any]]:
    if turn == "user":
        return [{"role": "user", "content": words.text()}]
    return [{"role": "tool", "content": words.text(), "name": "add", "tool_call_id": call_id(0)}]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("keep_thinking", [False, True])
def test_no_sampled_token_is_lost_or_tokenised_again_or_there_twice(name: str, keep_thinking: bool) -> None:
    check_conversations(name, PER_FAMILY // 2, keep_thinking=keep_thinking)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("keep_thinking", [False, True])
def test_nor_in_a_thousand_conversations_of_each_family(name: str, keep_thinking: bool) -> None:
    check_conversations(name, 1_000, keep_thinking=keep_thinking)


def check_conversations(name: str, num: int, *, keep_thinking: bool) -> None:
    tokenizer, form = family_tokenizer(name), chat_format(name, keep_thinking=keep_thinking)
    joints: set[Joint] = set()
    for seed in range(num):
        words = Words(seed)
        rng, tools = words.rng, [ADD] if words.rng.random() < 0.7 else []
        messages = [{"role": "user", "content": words.text()}]
        if rng.random() < 0.3 and name not in ("gemma", "mistral"):
            messages.insert(0, {"role": "system", "content": words.text()})
        context: list[int] = []
        # what the model has sampled, with its place in the context
        sampled: list[tuple[int, list[int]]] = []
        for _ in range(rng.randint(1, 4)):
            turn = "tool" if tools and rng.random() < 0.6 else "user"
            tokens, said = some_sampled(name, words, call=turn == "tool", thinks=rng.random() < 0.4)
            ending = rng.choice(["end", "end", "cut", "other"])
            other = tokenizer.token_id((FAMILIES[name].other_ends or (FAMILIES[name].eos,))[0])
            assert other is not None
            end = end_of(name, turn)
            tokens = tokens + {"end": [end], "cut": [], "other": [other]}[ending]
            sampled.append((len(context), tokens))
            context = context + tokens
            parsed = form.parse(tokens, tools)
            messages = [*messages, parsed.message]
            new = some_answer(words, turn)
            given = form.following(messages, new, last_token=tokens[-1], tools=tools)
            joints.add(given.joint)
            messages = [*messages, *new]
            assert given.tokens
            # some of phi3's tokens swallow the line break after them
            texts = [tokenizer.decode(given.tokens, skip_special_tokens=False), given.text]
            assert len({text.replace("\n", "") if name == "phi3" else text for text in texts}) == 1
            assert shown_once(new[0]["content"], given.text)
            if given.replaces:
                assert not keep_thinking
                context, sampled = list(given.tokens), []
                assert all(given.text.count(word) <= 1 for word in said)
                assert "<think>\nw" not in given.text
                continue
            assert not any(word in given.text for word in said)
            context = context + given.tokens
            if ending == "end":
                # not twice
                assert given.tokens[0] != end
            elif FAMILIES[name].end and ending == "cut":
                assert given.tokens[0] == end
                assert given.joint is Joint.BRIDGED
            # every sampled token is where it was
            assert all(context[at : at + len(own)] == own for at, own in sampled)
            before = sum(len(own) for _, own in sampled)
            assert len(context) - before == sum(map(len, _given_between(context, sampled)))
    assert Joint.CLEAN in joints or name == "deepseek-r1"
    assert (Joint.NEW_SEGMENT in joints) == (name in THINK and not keep_thinking)


def _given_between(context: list[int], sampled: list[tuple[int, list[int]]]) -> list[list[int]]:
    ends = [at + len(own) for at, own in sampled]
    return [
        context[: sampled[0][0]],
        *(context[end:at] for end, (at, _) in zip(ends, [*sampled[1:], (len(context), [])], strict=True)),
    ]


def shown_once(content: str, text: str) -> bool:
    return text.count(content) == 1 or text.count(json.dumps(content)) == 1


def shaped(message: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a message as a chat template reads it."""
    calls = message.get("tool_calls")
    if not calls or not as_text:
        return message
    function = calls[0]["function"]
    text = {**function, "arguments": json.dumps(function["arguments"])}
    return {**message, "tool_calls": [{**calls[0], "function": text}]}


@pytest.mark.parametrize(
    ("name", "turn"),
    # the prompt of deepseek-r1 opens thinking that its template strips
    [(name, "user") for name in FAMILIES if name != "deepseek-r1"]
    + [(name, "tool") for name in KEEPS_TOOL_ROLE if name != "deepseek-r1"],
)
def test_turns_are_joined_as_the_template_writes_the_whole_conversation(name: str, turn: str) -> None:
    """For texts that the tokenizer cuts as they were sampled, where the template is stable."""
    tokenizer, form = family_tokenizer(name), chat_format(name)
    tools = [ADD] if turn == "tool" else []
    for seed in range(20):
        words = Words(seed)
        messages: list[dict[str, Any]] = [{"role": "user", "content": words.text()}]
        message: dict[str, Any] = {"role": "assistant", "content": words.text()}
        new = some_answer(words, turn)
        if turn == "tool" and name != "smollm2":
            arguments = {"value": words.word()}
            call = {"id": call_id(0), "type": "function", "function": {"name": "add", "arguments": arguments}}
            message |= {"content": "", "tool_calls": [call]}
        if name == "glm" and turn == "tool":
            message[THINKING] = words.word()
        prompt = form.opening(messages, tools)
        as_text = name.startswith("deepseek")
        told = messages
        if tools and not form.facts(tools).writes_tools:
            # the template writes no tools, so the prompt tells of them
            assert '"add"' in prompt.text
            told = [{"role": "user", "content": told_text(prompt.text, messages[0]["content"])}]
        full = tokenizer.apply_chat_template([*told, shaped(message, as_text=as_text), *new], tools=tools)
        assert full.startswith(prompt.text)
        end = FAMILIES[name].end or ("<|observation|>" if turn == "tool" else "<|user|>")
        text = full[len(prompt.text) :]
        sampled = tokenizer.encode(text[: text.index(end)] + end, add_special_tokens=False)
        parsed = form.parse(sampled, tools)
        assert parsed.message["content"] == message["content"]
        assert parsed.message.get(THINKING) == message.get(THINKING)
        assert parsed.message.get("tool_calls") == message.get("tool_calls")
        given = form.following([*messages, parsed.message], new, last_token=sampled[-1], tools=tools)
        assert given.joint in ((Joint.CLEAN, Joint.BRIDGED) if name in ("mistral", "deepseek-v3") else (Joint.CLEAN,))
        whole = tokenizer.encode(full, add_special_tokens=False)
        assert [*prompt.tokens, *sampled, *given.tokens] == whole


def told_text(prompt: str, content: str) -> str:
    """Return the first message of a prompt with the tools in it."""
    at = prompt.index("You may call")
    return prompt[at : prompt.index(content) + len(content)]


def test_a_turn_that_was_cut_gets_the_end_that_it_lacks() -> None:
    tokenizer, form = family_tokenizer("qwen2.5"), chat_format("qwen2.5")
    asked = [{"role": "user", "content": "add"}]
    new = [{"role": "user", "content": "and?"}]
    said = tokenizer.encode("the sum", add_special_tokens=False)
    messages = [*asked, form.parse(said).message]
    end = end_of("qwen2.5", "user")

    def following(last: int | None) -> Given:
        return form.following(messages, new, last_token=last)

    cut, whole = following(said[-1]), following(end)
    assert (cut.joint, whole.joint) == (Joint.BRIDGED, Joint.CLEAN)
    assert cut.tokens == [end, *whole.tokens]
    other = tokenizer.token_id("<|endoftext|>")
    assert following(other).tokens == cut.tokens
    assert following(None).tokens == cut.tokens


def qwen3_conversation(form: ChatFormat, variables: dict[str, Any] | None = None) -> tuple[list[dict[str, Any]], str]:
    asked = [{"role": "user", "content": "add"}]
    said = family_tokenizer("qwen3").encode("<think>\nI add\n</think>\n\nfive<|im_end|>", add_special_tokens=False)
    return [*asked, form.parse(said, variables=variables).message], form.opening(asked, variables=variables).text


def test_thinking_that_the_template_strips_is_replaced_only_before_a_user_message() -> None:
    form = chat_format("qwen3")
    messages, prompt = qwen3_conversation(form)
    end = end_of("qwen3", "user")
    assert messages[1] == {"role": "assistant", "content": "five", THINKING: "I add"}
    stripped = form.following(messages, [{"role": "user", "content": "and?"}], last_token=end)
    assert stripped.replaces
    assert stripped.text.startswith(prompt + "five<|im_end|>\n<|im_start|>user\nand?")
    assert "I add" not in stripped.text
    kept = form.following(messages, some_answer(Words(1), "tool"), last_token=end)
    assert kept.joint is Joint.CLEAN
    # a turn without thinking has nothing to strip
    plain = [messages[0], {"role": "assistant", "content": "five"}]
    assert form.following(plain, [{"role": "user", "content": "and?"}], last_token=end).joint is Joint.CLEAN
    # and what was stripped before is not stripped again
    later = [*messages, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "six"}]
    assert not form.following(later, [{"role": "user", "content": "so"}], last_token=end).replaces


def test_thinking_stays_where_a_setting_keeps_it() -> None:
    form = chat_format("qwen3", keep_thinking=True)
    messages, _ = qwen3_conversation(form)
    given = form.following(messages, [{"role": "user", "content": "and?"}], last_token=end_of("qwen3", "user"))
    assert given.joint is Joint.BRIDGED
    assert given.text == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_empty_thinking_that_a_prompt_writes_is_no_reason_to_replace() -> None:
    form, variables = chat_format("qwen3"), {"enable_thinking": False}
    asked = [{"role": "user", "content": "add"}]
    prompt = form.opening(asked, variables=variables)
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
    for new in ([{"role": "user", "content": "and?"}], some_answer(Words(1), "tool")):
        given = form.following(
            [*asked, {"role": "assistant", "content": "five"}],
            new,
            last_token=end_of("qwen3", "user"),
            variables=variables,
        )
        assert not given.replaces
        assert given.text.endswith("<think>\n\n</think>\n\n")


def test_thinking_that_the_prompt_opens_is_read_and_closed_when_it_is_stripped() -> None:
    tokenizer, form = family_tokenizer("deepseek-r1"), chat_format("deepseek-r1")
    asked = [{"role": "user", "content": "add"}]
    prompt = form.opening(asked)
    assert prompt.text.endswith("<think>\n")
    said = tokenizer.encode("I add\n</think>\n\nfive", add_special_tokens=False)
    message = form.parse(said).message
    assert message == {"role": "assistant", "content": "five", THINKING: "I add"}
    given = form.following([*asked, message], [{"role": "user", "content": "so"}], last_token=said[-1])
    assert given.replaces
    assert given.text.startswith(prompt.text.removesuffix("<think>\n") + "\n\nfive<｜end▁of▁sentence｜><｜User｜>so")
    unended = form.parse(tokenizer.encode("I think", add_special_tokens=False)).message
    assert unended == {"role": "assistant", "content": "", THINKING: "I think"}


DATED = """{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}[a]{{ m.content.split('</think>')[-1] }}[e]
{%- else %}[{{ m.role[0] }}{{ messages | length }}]{{ m.content }}[e]{% endif %}{% endfor %}[a]"""


def test_a_prompt_that_the_template_would_change_is_written_again_and_may_be_kept() -> None:
    from pipeline.data.tokenizer import TextTokenizer

    tokenizer = TextTokenizer(family_tokenizer("qwen3")._tokenizer, {}, DATED, "dated")  # pyright: ignore[reportPrivateUsage]
    asked = [{"role": "user", "content": "add"}]
    messages = [*asked, {"role": "assistant", "content": "five", THINKING: "I add"}]
    new = [{"role": "user", "content": "so"}]
    given = ChatFormat(tokenizer).following(messages, new, last_token=None)
    assert (given.text, given.replaces) == ("[u3]add[e][a]\n\nfive[e][u3]so[e][a]", True)
    kept = ChatFormat(tokenizer, keep_thinking=True)
    assert kept.following(messages, new, last_token=None).text == "[e][u3]so[e][a]"


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    from pipeline.data.tokenizer import TextTokenizer

    bare = TextTokenizer(family_tokenizer("qwen3")._tokenizer, {}, None, "bare")  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(DataError, match="chat template"):
        ChatFormat(bare)


@pytest.mark.parametrize("name", ["smollm2", "gemma", "phi3", "deepseek-v3"])
def test_tools_that_a_template_does_not_write_are_told_in_the_first_message(name: str) -> None:
    form = chat_format(name)
    text = form.opening([{"role": "user", "content": "add two"}], [ADD]).text
    assert text.index('"name": "add"') < text.index("add two")
    assert "tool_call" not in form.opening([{"role": "user", "content": "add two"}]).text


@pytest.mark.parametrize("name", ["gemma", "phi3", "phi4"])
def test_results_become_a_user_message_where_the_template_knows_no_tools(name: str) -> None:
    form = chat_format(name)
    asked = [{"role": "user", "content": "add"}]
    said = {"role": "assistant", "content": "so"}
    results = [{"role": "tool", "content": text, "tool_call_id": call_id(0)} for text in ("five", "six")]
    given = form.following(
        [*asked, said],
        [*results, {"role": "user", "content": "go on"}],
        last_token=None,
        tools=[ADD],
    )
    assert "five\nsix\ngo on" in given.text


def test_several_results_follow_where_the_template_takes_one_call_a_turn() -> None:
    form = chat_format("llama3")
    asked = [{"role": "user", "content": "add"}]
    calls = [{"id": call_id(n), "type": "function", "function": {"name": "add", "arguments": {}}} for n in range(2)]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": text, "tool_call_id": call_id(n)} for n, text in enumerate(("five", "six"))]
    given = form.following([*asked, turn], results, last_token=None, tools=[ADD])
    assert given.text.count("ipython") == 2


def test_calls_that_cannot_be_read_stay_in_the_content_beside_the_good_ones() -> None:
    tokenizer, form = family_tokenizer("qwen3"), chat_format("qwen3")
    bad = '<tool_call>\n{"name": "add", "arguments": {\n</tool_call>'
    good = '<tool_call>\n{"name": "add", "arguments": {"value": "five"}}\n</tool_call>'
    turn = form.parse(tokenizer.encode(f"so\n{good}\n{bad}<|im_end|>", add_special_tokens=False), [ADD])
    assert [call.status for call in turn.calls] == ["ok", "invalid_json"]
    assert turn.message["content"] == turn.message[WRITTEN] == f"so\n{good}\n{bad}"
    assert [call["function"]["name"] for call in turn.message["tool_calls"]] == ["add"]
    clean = form.parse(tokenizer.encode(f"so\n{good}", add_special_tokens=False), [ADD]).message
    assert clean["content"] == "so"


def test_content_may_be_a_list_of_parts_where_the_template_takes_one() -> None:
    from pipeline.data.tokenizer import TextTokenizer

    template = "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    template += "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}assistant:"
    made = family_tokenizer("qwen3")._tokenizer  # pyright: ignore[reportPrivateUsage]
    form = ChatFormat(TextTokenizer(made, {}, template, "parts"))
    parts = [{"type": "text", "text": "add"}]
    prompt = form.opening([{"role": "user", "content": parts}], [ADD])
    assert prompt.text.startswith("user:You may call")
    assert prompt.text.endswith("add\nassistant:")


@pytest.mark.parametrize(
    ("text", "is_open", "wanted"),
    [
        ("five", False, ("", "five")),
        ("<think>\nI add\n</think>\n\nfive", False, ("I add", "five")),
        ("I add</think>five", True, ("I add", "five")),
        ("<think>I add</think>five", True, ("I add", "five")),
        ("I add</think>five", False, ("", "I add</think>five")),
        ("<think>I add", False, ("I add", "")),
    ],
)
def test_thinking_is_read_apart(text: str, is_open: bool, wanted: tuple[str, str]) -> None:
    assert split_thinking(text, is_open=is_open) == wanted
