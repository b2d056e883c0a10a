"""Prompts for guided passes: the question of a response with its gold text, or with its judgment.

A template is a UTF-8 text file with slots:

    {question}   the sampled prompt; in a conversation, its last user message
    {gold}       the answer, or the worked solution
    {judgment}   what is wrong with the response

The standard template needs ``{question}`` and ``{gold}``, the judge template ``{question}`` and
``{judgment}``. Other braces stay as they are, also in the texts filled in. One trailing line end of
the file is ignored, so that a question at the template's end is followed by the response, as in
sampling.

A conversation goes through the tokenizer's chat template: the filled template replaces its last
user message. The guided prompt replaces the sampled one before the response's tokens, which are
never re-tokenised."""

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
    """One template and the slots it must have."""

    def __init__(self, text: str, slots: Sequence[str], name: str) -> None:
        """``name`` is the setting or file for errors. Raises ConfigError if one of ``slots`` is
        missing, or the standard template has a judgment slot."""
        self.text = text.removesuffix("\n").removesuffix("\r")
        self.slots = Counter(_SLOT.findall(self.text))
        found = self.slots.keys()
        missing = [f"{{{slot}}}" for slot in slots if slot not in found]
        if missing:
            there = ", ".join(f"{{{slot}}}" for slot in sorted(found)) or "no slot"
            raise ConfigError(
                f"{name} has no {' and no '.join(missing)}, but {there}; put {' and '.join(missing)} into it"
            )
        if "judgment" in found and "judgment" not in slots:
            raise ConfigError(
                f"{name} has {{judgment}}, but it also serves right responses, which have no judgment; expected {{question}} "
                "and {gold}: put {judgment} into guidance.judge_template"
            )

    def filled(self, texts: Mapping[str, str]) -> str:
        return _SLOT.sub(lambda slot: texts[slot[1]], self.text)


def read_templates(guidance: GuidanceSection) -> tuple[GuidanceTemplate, GuidanceTemplate]:
    """Read the standard and the judge template of a run. Raises ConfigError if a file is missing,
    is not text, or lacks a slot."""
    standard = _read("standard", guidance.standard_template, ("question", "gold"))
    return standard, _read("judge", guidance.judge_template, ("question", "judgment"))


class GuidedPrompts:
    """Makes guided prompts for one tokenizer and two templates."""

    def __init__(self, tokenizer: TextTokenizer, guidance: GuidanceSection, *, model_digest: str = "") -> None:
        """``model_digest`` is that of the model that reads the prompts. Raises like ``read_templates``."""
        self._tokenizer = tokenizer
        self._standard, self._judge = read_templates(guidance)
        self._max_text_tokens = guidance.max_judgment_tokens
        inputs = [self._standard.text, self._judge.text, tokenizer.digest, model_digest]
        self.version = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]
        """Hash of templates, tokenizer and model: log-probs are only comparable within a version."""

    def standard(self, prompt: Prompt, gold: str) -> np.ndarray:
        """Return int32 [tokens] of the prompt with the gold text. Raises DataError if the text is
        too long, or the conversation cannot be rendered."""
        self._check("gold text", gold)
        return self._tokens(self._standard, prompt, {"gold": gold})

    def judge(self, prompt: Prompt, gold: str, judgment: str) -> np.ndarray:
        """Return int32 [tokens] of the prompt with the judgment. Raises like ``standard``."""
        self._check("judgment", judgment)
        return self._tokens(self._judge, prompt, {"gold": gold, "judgment": judgment})

    def longest(self, max_prompt_tokens: int, max_text_tokens: int | None = None) -> int:
        """Return the most tokens that a guided prompt can have, given the limits of sampled prompts
        and of texts (by default the run's)."""
        most = self._max_text_tokens if max_text_tokens is None else max_text_tokens
        return max(
            self._size(template.filled(_NOTHING))
            + template.slots["question"] * max_prompt_tokens
            + (template.slots["gold"] + template.slots["judgment"]) * most
            for template in (self._standard, self._judge)
        )

    def lost_characters(self) -> str:
        """Return the characters of the templates that the tokenizer cannot encode, each once."""
        text = "".join(dict.fromkeys(self._standard.filled(_NOTHING) + self._judge.filled(_NOTHING)))
        decoded = self._tokenizer.decode(self._tokenizer.encode(text, add_special_tokens=False))
        return "".join(one for one in text if not one.isspace() and one not in decoded)

    def _check(self, what: str, text: str) -> None:
        size = self._size(text)
        if size > self._max_text_tokens:
            raise DataError(
                f"the {what} has {size} tokens, but guidance.max_judgment_tokens is {self._max_text_tokens}; raise it, or "
                "shorten the text"
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
    """Return the conversation with the filled template as its last user message. Raises DataError."""
    at = max((number for number, message in enumerate(messages) if message.get("role") == _USER), default=None)
    if at is None:
        raise DataError("the conversation has no user message; a guidance template needs one as its question")
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
