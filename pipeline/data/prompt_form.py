"""How a line's prompt becomes text and tokens: through the model's chat template, or as text.

A conversation always goes through the chat template. A plain prompt does by ``data.chat``:

    auto    one message of the user, if the tokenizer has a chat template, ``data.prompt_template``
            is not given, and the prompt is not rendered already: it begins with a special token
    true    one message of the user, filled into ``data.prompt_template`` first
    false   text, filled into ``data.prompt_template``

Everything that samples, evaluates, measures lengths or shows prompts renders them here. A text gets
the tokenizer's first tokens once, whether or not it begins with them. The chat template writes its
own."""

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
"""Key of a prompt's conversation in its ``extra``, before rendering; kept with a reward
model, and with guidance."""


CHAT_VARIABLES = "chat_variables"
"""Key of the chat template's variables beside these messages, where there are any."""


def conversation_tokens(tokenizer: TextTokenizer, prompt: Prompt, response: str) -> np.ndarray:
    """Return int32 [tokens]. Raises DataError when the chat template refuses the messages."""
    if not tokenizer.has_chat_template:
        return np.array(tokenizer.encode(prompt.text + response), np.int32)
    before = prompt.extra.get(MESSAGES) or [{"role": "user", "content": prompt.text}]
    messages = [*before, {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    # the template writes them itself
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


HOLE: Final = "{prompt}"
_SYSTEM: Final = "system"
_FIRST_ROLES: Final = (_SYSTEM, "developer")


class Form(StrEnum):
    """How a prompt was made, in words."""

    CONVERSATION = "a conversation in the chat template"
    QUESTION = "one message of the user in the chat template"
    RENDERED = "text that begins with a special token, as it is"
    TEXT = "plain text, without a chat template"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the model reads it."""

    form: Form
    text: str
    tokens: list[int]
    messages: list[Mapping[str, Any]] | None
    """What the chat template was given; None for text."""


class PromptForm:
    """Renders the prompts of one data set."""

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
        """``where``: the section in errors. Raises ConfigError: the template has no place for the
        prompt, or the tokenizer lacks the chat template that the settings need."""
        if HOLE not in template:
            raise ConfigError(f"data.prompt_template is {template!r}; it must contain {HOLE}")
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
        """Return the form of a set's prompts: by its own settings, else by those of ``[data]``."""

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
        """Return a plain prompt or a conversation as the model reads it. Raises DataError when the
        chat template refuses it, ConfigError when a system prompt is set and the prompt is text."""
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
        # special tokens are not part of a question's text
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
