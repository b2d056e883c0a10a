"""The registry's transitions, one script each (``pipeline.ledger.redis.lua``)."""

from __future__ import annotations

from pipeline.ledger.redis.lua import Scripts

SCRIPTS = Scripts(__name__)
