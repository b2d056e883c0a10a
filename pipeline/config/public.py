"""Settings as they are shown: without passwords, keys and tokens.

Only ``without_secrets`` hides them, for ``headrace config show``, reports, comparisons, model cards
and sinks. A run's own files keep the tables for other libraries unmasked, since engines read them
from there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from pipeline.config import RESOLVED_NAME
from pipeline.ledger.url import MASK, hide_password

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_WORDS: Final = (
    "token", "password", "passwd", "passphrase", "secret", "apikey", "accesskey", "credential", "credentials",
    "authorization", "cookie",
)  # fmt: skip
_ENDS: Final = (*_WORDS, "key")
"""A setting whose name ends with one of these is hidden, also in tables for other libraries."""
_ASSIGNED: Final = re.compile(
    rf"(?i)((?:[\w-]*(?:{'|'.join(_WORDS)})|[\w-]*[_-]key)\s*=\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&'\"]+)"
)
"""``HF_TOKEN=...`` and ``--api-key=...`` in commands, and lines of TOML."""
_LEDGERS: Final = ("redis:", "rediss:", "redis+", "rediss+", "unix:")
"""Schemes of ledger URLs."""


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a setting of this name, or a tree of settings, with every secret masked. Secrets are
    values whose name says so, and the user and password of a URL."""
    if isinstance(value, dict):
        tree = cast("dict[str, Any]", value)
        return {of: without_secrets(held, name if _is_secret(name) else of) for of, held in tree.items()}
    if isinstance(value, list | tuple):
        return _list(cast("list[Any]", value), name)
    if _is_secret(name) and not isinstance(value, bool) and value not in (None, ""):
        return MASK
    return _text(value) if isinstance(value, str) else value


def public_settings(config: RunConfig) -> dict[str, Any]:
    return without_secrets(config.model_dump(mode="json"))


def kept_settings(config: RunConfig) -> dict[str, Any]:
    """Return every setting as plain values for the run's own files, from which its processes read
    them. The ledger's passwords are hidden: ``ledger.json`` has them."""
    settings = config.model_dump(mode="json")
    return settings | {"ledger": without_secrets(settings["ledger"])}


def public_tree(run_dir: Path) -> dict[str, Any]:
    """Return a run's resolved settings without secrets. Raises OSError or ValueError for a file
    that cannot be read."""
    return without_secrets(tomllib.loads((run_dir / RESOLVED_NAME).read_text(encoding="utf-8")))


def _list(values: list[Any] | tuple[Any, ...], name: str) -> list[Any]:
    """Return a list without secrets, such as the word after an option ``--token``."""
    before = ("", *values)
    options = (word if isinstance(word, str) and word.startswith("-") else "" for word in before)
    return [without_secrets(held, option or name) for held, option in zip(values, options, strict=False)]


def _text(value: str) -> str:
    hidden = hide_password(value)
    # The option token of a ledger URL names a file.
    return hidden if value.startswith(_LEDGERS) else _ASSIGNED.sub(rf"\1{MASK}", hidden)


def _is_secret(name: str) -> bool:
    return name.lower().replace("-", "").replace("_", "").endswith(_ENDS)
