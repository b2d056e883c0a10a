"""Settings: ``schema`` declares them, ``load`` reads, merges and checks them."""

from __future__ import annotations

from typing import Final

RESOLVED_NAME: Final = "config.toml"
"""The resolved configuration, in the run's folder."""
