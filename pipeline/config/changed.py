"""The settings that `headrace update` has changed in a run, read without the schema."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipeline.config import CHANGES_NAME
from protocol.errors import ConfigError


class _Change(msgspec.Struct):
    holds: dict[str, str]


def changed_settings(run_dir: Path) -> dict[str, str]:
    """Return the settings that `headrace update` has changed in a run: TOML values by key, as the
    supervisor recorded them. Raises ConfigError for a damaged file."""
    path = run_dir / CHANGES_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Change])[-1].holds
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, IndexError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; the supervisor of a running run writes it again; otherwise restore "
            f"it, or remove it to start from config.toml"
        ) from None
