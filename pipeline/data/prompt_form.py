"""How a line's prompt becomes text and tokens: through the model's chat template, or as plain text.

A conversation always goes through the chat template. For a plain prompt ``data.chat`` decides:

    auto    one user message, if the tokenizer has a chat template, ``data.prompt_template`` is not set,
            and the prompt is not already rendered (does not begin with a special token); else text
    true    one user message, filled into ``data.prompt_template`` first
    false   text, filled into ``data.prompt_template``

Everything that samples, evaluates, measures or shows prompts renders them here. A text gets the
tokenizer's special first tokens once, even if it already begins with them; a chat template writes
its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

import numpy as np

from pipeline.config.data_sets import DataSetSection, EvaluationSetSection
from pipeline.config.training import DataSection
from pipeline.data.tokenizer import TextTokenizer
from protocol.errors import ConfigError
from protocol.trajectory import Prompt

MESSAGES = "messages"
"""Key in a prompt's ``extra``: its conversation before rendering, kept for reward models and guidance."""


CHAT_VARIABLES = "chat_variables"
"""Key in a prompt's ``extra``: the chat template's variables for this conversation, if any."""


def conversation_tokens(tokenizer: TextTokenizer, prompt: Prompt, response: str) -> np.ndarray:
    """Return int32 [tokens] of the prompt's conversation with the response added. Raises DataError
    if the chat template rejects the messages."""
    if not tokenizer.has_chat_template:
        return np.array(tokenizer.encode(prompt.text + response), np.int32)
    before = prompt.extra.get(MESSAGES) or [{"role": "user", "content": prompt.text}]
    messages = [*before, {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    # the template has already written the special tokens
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


HOLE: Final = "{prompt}"
_SYSTEM: Final = "system"
_FIRST_ROLES: Final = (_SYSTEM, "developer")


class Form(StrEnum):
    """How a prompt was rendered, as shown to people."""

    CONVERSATION = "a conversation in the chat template"
    QUESTION = "one user message in the chat template"
    RENDERED = "text that begins with a special token, unchanged"
    TEXT = "plain text, without a chat template"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    form: Form
    text: str
    tokens: list[int]
    messages: list[Mapping[str, Any]] | None
    """The messages given to the chat template; None for text."""


class PromptForm:
    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        chat: Literal["auto"] | bool = "auto",
        template: str = HOLE,
        system_prompt: str | None = None,
        variables: Mapping[str, Any] | None = None,
        where: str = "data",
    ) -> None:
        """Render the prompts of one data set. ``where`` is the section for errors. Raises
        ConfigError if the template has no place for the prompt, or the tokenizer lacks a chat
        template that the settings need."""
        if HOLE not in template:
            raise ConfigError(f"data.prompt_template is {template!r}; it must contain {HOLE}: add it")
        needs = [
            name
            for name, given in (("chat", chat is True), ("system_prompt", system_prompt), ("chat_variables", variables))
            if given
        ]
        if needs and not tokenizer.has_chat_template:
            raise ConfigError(
                f"{where}.{needs[0]} is set, but the model's tokenizer has no chat template; expected one in "
                "chat_template.jinja or tokenizer_config.json of model.path: add it, or remove the setting"
            )
        self._tokenizer, self._chat, self._template = tokenizer, chat, template
        self._system, self.variables, self._where = system_prompt, dict(variables or {}), where

    @classmethod
    def of(
        cls, tokenizer: TextTokenizer, data: DataSection, one: DataSetSection | EvaluationSetSection | None = None
    ) -> PromptForm:
        """Use a set's own settings, else those of ``[data]``."""

        def pick(name: str) -> Any:
            own = getattr(one, name, None)
            return getattr(data, name) if own is None else own

        section = "data.sets" if isinstance(one, DataSetSection) else "evaluation.sets"
        return cls(
            tokenizer,
            chat=pick("chat"),
            template=data.prompt_template,
            system_prompt=pick("system_prompt") or None,
            variables=pick("chat_variables"),
            where=f"{section} {one.name}" if one else "data",
        )

    def render(self, prompt: str | Sequence[Mapping[str, Any]]) -> RenderedPrompt:
        """Render a plain prompt or a conversation. Raises DataError if the chat template rejects
        it, ConfigError if a system prompt is set but the prompt is plain text."""
        if not isinstance(prompt, str):
            return self._conversation(Form.CONVERSATION, list(prompt))
        text = self._template.replace(HOLE, prompt)
        form = self._form_of(text)
        if form is Form.QUESTION:
            return self._conversation(form, [{"role": "user", "content": text}])
        if self._system is not None:
            raise ConfigError(
                f"{self._where}.system_prompt is set, but the prompt {prompt!r:.60} is {form}, which cannot hold "
                f"one; expected a conversation: set {self._where}.chat = true, or remove the system prompt"
            )
        return RenderedPrompt(form, text, self._tokenizer.encode(text), None)

    def _form_of(self, text: str) -> Form:
        if self._chat is True:
            return Form.QUESTION
        is_rendered = (
            text.lstrip().startswith(tuple(filter(None, self._tokenizer.special_ids)))
            and self._tokenizer.has_chat_template
        )
        if is_rendered:
            return Form.RENDERED
        is_chat = self._chat == "auto" and self._tokenizer.has_chat_template and self._template == HOLE
        return Form.QUESTION if is_chat else Form.TEXT

    def _conversation(self, form: Form, messages: list[Mapping[str, Any]]) -> RenderedPrompt:
        if self._system is not None and messages[0].get("role") not in _FIRST_ROLES:
            messages = [{"role": _SYSTEM, "content": self._system}, *messages]
        text, tokens = self._tokenizer.render_chat(messages, self.variables)
        return RenderedPrompt(form, text, tokens, messages)
