"""The ledger's transitions as Lua, one script each; what they share is put before every one.

*Consumes* nothing. *Produces* script texts. *Waits for* nothing. Each script's header names its
keys, arguments and answer.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

_WHOLE = """{common}
local left
local function leaving()
if left then return left end
{leaving}
end
{ready}
local function transition()
{script}
end
local reply = transition()
write_counts()
return reply
"""


@cache
def load(name: str) -> str:
    """Return the whole text of a script. What it counted is written when it has returned."""
    folder = resources.files(__name__)
    parts = {"common": "common", "leaving": "leaving", "ready": "ready", "script": name}
    return _WHOLE.format(**{part: folder.joinpath(f"{file}.lua").read_text("utf-8") for part, file in parts.items()})


@cache
def digest(name: str) -> str:
    """Return the name that the server gives a script."""
    return hashlib.sha1(load(name).encode(), usedforsecurity=False).hexdigest()
