"""Settings: ``schema`` declares them, ``load`` reads, merges and checks them."""

from __future__ import annotations

from typing import Final

RESOLVED_NAME: Final = "config.toml"
"""Name of the resolved configuration in the run's folder."""
CHANGES_NAME: Final = "settings-changes.json"
"""Name of the record, in the run's folder, of settings changed since the run's start."""
