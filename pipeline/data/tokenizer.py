"""A model folder's tokenizer without torch: text or chat messages to tokens, tokens to text.

Token ids and text equal those of ``transformers.AutoTokenizer``, but only the ``tokenizers``
package is loaded (20 ms). AutoTokenizer would import torch (2.4 s and a few hundred MB) in
processes that only decode.

One deliberate difference: chat templates do not see today's date (``strftime_now``), because
workers must read the same prompt from the same line on any day. Templates then fall back to a date
written in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from protocol.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class _Generation(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it is ignored."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    return made


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextTokenizer:
    """Tokenizes text and chat messages, and decodes tokens. Made by ``load_text_tokenizer``."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: Mapping[str, str], template: str | None, digest: str):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        self._template_text = template
        self._template: jinja2.Template | None = None
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = {token.content: number for number, token in added.items() if token.special}
        """Ids of the special tokens, by their text."""
        self._silent = frozenset(self.special_ids.values())
        self.digest = digest
        """Hex SHA-256 of the files it was read from."""

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, including added tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template_text is not None

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token; None if the tokenizer names none."""
        return self.token_id(self._special_tokens.get("eos_token", ""))

    def token_id(self, token: str) -> int | None:
        """Return a token's id, or None if it is not in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids, by default with the tokenizer's special first tokens. A text that
        already begins with these gets no second ones."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and text.startswith(tuple(filter(None, self.special_ids))):
            plain = self._tokenizer.encode(text, add_special_tokens=False).ids
            added = len(ids) - len(plain)
            # search from the end: the added first tokens may equal those of the text
            before = next((n for n in range(added, 0, -1) if ids[n : n + len(plain)] == plain), 0)
            return ids[before:] if plain[:before] == ids[:before] else ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def is_plain(self, tokens: Sequence[int]) -> bool:
        """Return whether none of the tokens is special."""
        return self._silent.isdisjoint(tokens)

    def has_text(self, token: int) -> bool:
        """Return whether a token decodes to text: special tokens and unknown ids do not."""
        return token not in self._silent and self._tokenizer.id_to_token(token) is not None

    @cached_property
    def turn_end_id(self) -> int | None:
        """Id of the token that ends the assistant's turn in the chat template; None if there is none."""
        if not self.has_chat_template:
            return None
        words = "headrace"
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}]
        try:
            _, mark, tail = self.apply_chat_template(said, add_generation_prompt=False).rpartition(words)
        except DataError:
            return None
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        ends = [token for token in added if token and mark and tail.lstrip().startswith(token)]
        return self.token_id(max(ends, key=len)) if ends else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a conversation as text; as a prompt, up to where the assistant's answer begins.
        ``variables`` are the template's own, ``tools`` the JSON schemas of functions. Raises DataError
        if there is no chat template, or it rejects the messages."""
        import jinja2

        if self._template is None:
            self._template = self._compile()
        try:
            # as AutoTokenizer does: templates also ask whether tools are none
            settings = {"tools": None, **(variables or {}), **({"tools": list(tools)} if tools else {})}
            settings |= {"add_generation_prompt": add_generation_prompt, **self._special_tokens}
            return self._template.render(messages=messages, **settings)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the chat template refuses these messages: {error}") from error

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> tuple[str, list[int]]:
        """Return the chat template's prompt and its token ids. Raises DataError."""
        text = self.apply_chat_template(messages, variables)
        # the template has already written the special tokens
        return text, self.encode(text, add_special_tokens=False)

    def _compile(self) -> jinja2.Template:
        import jinja2

        if self._template_text is None:
            raise DataError(
                f"the tokenizer has no chat template, but a line has messages; add {_TEMPLATE} to the model folder, "
                "or use prompt columns"
            )
        try:
            return environment().from_string(self._template_text)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template does not compile: {error}") from error


def load_text_tokenizer(path: Path) -> TextTokenizer:
    """Read the tokenizer of a Hugging Face model folder. Raises DataError if the folder or its
    ``tokenizer.json`` is missing or malformed."""
    from tokenizers import Tokenizer

    if not path.is_dir():
        raise DataError(f"{path}: no such folder; model.path must be a model folder in Hugging Face format")
    file = path / _TOKENIZER
    if not file.is_file():
        raise DataError(
            f"{path}: it has no {_TOKENIZER}; write one with transformers: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    try:
        text = file.read_text(encoding="utf-8")
        # the tokenizers package raises bare Exception for whatever is wrong
        json.loads(text)
        config_file = path / _CONFIG
        config: Any = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: the tokenizer cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{config_file}: expected an object, got a {type(config).__name__}")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        # the package's only exception type
        raise DataError(f"{file}: not a tokenizer of the tokenizers package: {error}") from error
    template = _template_of(path, config)
    special_tokens = {name: token for name in _SPECIAL if (token := _token_text(config.get(name))) is not None}
    digest = hashlib.sha256(json.dumps([text, special_tokens, template]).encode()).hexdigest()
    return TextTokenizer(tokenizer, special_tokens, template, digest)


def _template_of(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / _TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    # a list of named templates
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
