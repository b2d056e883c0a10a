"""The prompts of guided passes: the question of a response with its gold text, or its judgment.

A template is a file of text in UTF-8 with slots:

    {question}   the prompt as it was sampled from; of a conversation, its last message of the user
    {gold}       the answer, or the worked solution
    {judgment}   what is wrong with the response

The standard template has ``{question}`` and ``{gold}``, the judge template ``{question}`` and
``{judgment}``. Other braces stay as they are, and so do those in the texts that are put in. One
line end at the end of the file does not count. A question at the template's end is followed by the
response, as in sampling.

A conversation goes through the tokenizer's chat template: its last message of the user becomes the
filled template, and all other messages stay. A guided prompt takes the place of the sampled one
before the response's tokens, which are never tokenised again."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from pipeline.config.rewards import GuidanceSection
from pipeline.data.prompt_form import CHAT_VARIABLES, MESSAGES
from pipeline.data.tokenizer import TextTokenizer
from protocol.errors import ConfigError, DataError
from protocol.trajectory import Prompt

_BUILT_IN: Final = Path(__file__).parent / "guidance_templates"
_SLOT: Final = re.compile(r"\{(question|gold|judgment)\}")
_NOTHING: Final = {"question": "", "gold": "", "judgment": ""}
_USER: Final = "user"


class GuidanceTemplate:
    """One template, with the slots that it must have."""

    def __init__(self, text: str, slots: Sequence[str], name: str) -> None:
        """``name``: the setting or file that errors name. Raises ConfigError: a slot of ``slots``
        is missing, or the standard template has one for a judgment."""
        self.text = text.removesuffix("\n").removesuffix("\r")
        self.slots = Counter(_SLOT.findall(self.text))
        """How often each slot occurs."""
        found = self.slots.keys()
        missing = [f"{{{slot}}}" for slot in slots if slot not in found]
        if missing:
            there = ", ".join(f"{{{slot}}}" for slot in sorted(found)) or "no slot"
            raise ConfigError(
                f"{name} has no {' and no '.join(missing)}, but {there}; put {' and '.join(missing)} into it"
            )
        if "judgment" in found and "judgment" not in slots:
            raise ConfigError(
                f"{name} has {{judgment}}, and right responses, which it is for too, have none; expected {{question}} and "
                "{gold}: put {judgment} into guidance.judge_template"
            )

    def filled(self, texts: Mapping[str, str]) -> str:
        """Return the text with each slot filled, from ``texts`` by the slots' names."""
        return _SLOT.sub(lambda slot: texts[slot[1]], self.text)


def read_templates(guidance: GuidanceSection) -> tuple[GuidanceTemplate, GuidanceTemplate]:
    """Return the standard and the judge template of a run. Raises ConfigError: a file is missing,
    is no text, or has not the slots that it must have."""
    standard = _read("standard", guidance.standard_template, ("question", "gold"))
    return standard, _read("judge", guidance.judge_template, ("question", "judgment"))


class GuidedPrompts:
    """Makes guided prompts of one tokenizer and two templates."""

    def __init__(self, tokenizer: TextTokenizer, guidance: GuidanceSection, *, model_digest: str = "") -> None:
        """``model_digest``: of the model that reads them. Raises what ``read_templates`` does."""
        self._tokenizer = tokenizer
        self._standard, self._judge = read_templates(guidance)
        self._max_text_tokens = guidance.max_judgment_tokens
        told = [self._standard.text, self._judge.text, tokenizer.digest, model_digest]
        self.version = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]
        """Of templates, tokenizer and model: equal log-probs need equal versions."""

    def standard(self, prompt: Prompt, gold: str) -> np.ndarray:
        """Return int32 [tokens] of the prompt with the gold text. Raises DataError: the text is too
        long, or the conversation cannot be rendered."""
        self._check("gold text", gold)
        return self._tokens(self._standard, prompt, {"gold": gold})

    def judge(self, prompt: Prompt, gold: str, judgment: str) -> np.ndarray:
        """Return int32 [tokens] of the prompt with the judgment. Raises what ``standard`` does."""
        self._check("judgment", judgment)
        return self._tokens(self._judge, prompt, {"gold": gold, "judgment": judgment})

    def longest(self, max_prompt_tokens: int, max_text_tokens: int | None = None) -> int:
        """Return the tokens of the longest guided prompt, with sampled prompts and texts of at most
        so many. ``max_text_tokens``: by default the run's limit."""
        most = self._max_text_tokens if max_text_tokens is None else max_text_tokens
        return max(
            self._size(template.filled(_NOTHING))
            + template.slots["question"] * max_prompt_tokens
            + (template.slots["gold"] + template.slots["judgment"]) * most
            for template in (self._standard, self._judge)
        )

    def lost_characters(self) -> str:
        """Return characters of the templates that the tokenizer has no token for, each once."""
        text = "".join(dict.fromkeys(self._standard.filled(_NOTHING) + self._judge.filled(_NOTHING)))
        there = self._tokenizer.decode(self._tokenizer.encode(text, add_special_tokens=False))
        return "".join(one for one in text if not one.isspace() and one not in there)

    def _check(self, what: str, text: str) -> None:
        size = self._size(text)
        if size > self._max_text_tokens:
            raise DataError(
                f"the {what} has {size} tokens, guidance.max_judgment_tokens is {self._max_text_tokens}; raise it, or give "
                "shorter ones"
            )

    def _size(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _tokens(self, template: GuidanceTemplate, prompt: Prompt, texts: Mapping[str, str]) -> np.ndarray:
        messages: list[dict[str, Any]] | None = prompt.extra.get(MESSAGES)
        if messages is None:
            tokens = self._tokenizer.encode(template.filled({**texts, "question": prompt.text}))
        else:
            variables = prompt.extra.get(CHAT_VARIABLES)
            _, tokens = self._tokenizer.render_chat(_guided(messages, template, texts), variables)
        if not tokens:
            raise DataError("the guided prompt has no tokens: the tokenizer does not know any of its characters")
        return np.array(tokens, np.int32)


def _guided(
    messages: Sequence[Mapping[str, Any]], template: GuidanceTemplate, texts: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """Return the conversation with the template around its last question. Raises DataError."""
    at = max((number for number, message in enumerate(messages) if message.get("role") == _USER), default=None)
    if at is None:
        raise DataError("the conversation has no message of the user, which a guidance template could go around")
    content = template.filled({**texts, "question": str(messages[at].get("content", ""))})
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]


def _read(kind: str, path: Path | None, slots: Sequence[str]) -> GuidanceTemplate:
    name = f"guidance.{kind}_template"
    file = _BUILT_IN / f"{kind}.txt" if path is None else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name}: {file} cannot be read as text in UTF-8: {error}; correct the path or the file"
        ) from error
    return GuidanceTemplate(text, slots, name if path is None else f"{name}: {path}")
