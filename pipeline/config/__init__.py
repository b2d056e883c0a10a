"""Settings: ``schema`` declares them, ``load`` reads, merges and checks them."""

from __future__ import annotations

from typing import Final

RESOLVED_NAME: Final = "config.toml"
"""The resolved configuration, in the run's folder."""
CHANGES_NAME: Final = "settings-changes.json"
"""The changes of a run's settings since its start, in the run's folder."""
