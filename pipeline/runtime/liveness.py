"""When a worker counts as silent."""

from __future__ import annotations

from typing import Final

SILENT_AFTER_S: Final = 5.0
"""Heartbeats come every second; this many missed ones are worth a word."""
