"""Settings: ``schema`` says what they are, ``load`` reads, merges and refuses them. The only door
to pydantic.
"""

from __future__ import annotations

from typing import Final

RESOLVED_NAME: Final = "config.toml"
"""The resolved configuration, in the run's folder."""
