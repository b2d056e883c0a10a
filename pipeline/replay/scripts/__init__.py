"""The ledger's transitions as Lua, one script each; ``common.lua`` is put before every one.

*Consumes* nothing. *Produces* script texts. *Waits for* nothing. Each script's header names its keys, arguments and answer.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

_WHOLE = """{common}
local function transition()
{script}
end
local reply = transition()
write_counts()
return reply
"""


@cache
def load(name: str) -> str:
    """Return the whole text of a script, ``common.lua`` included. What it counted is written when it has returned."""
    folder = resources.files(__name__)
    common, script = (folder.joinpath(f"{part}.lua").read_text("utf-8") for part in ("common", name))
    return _WHOLE.format(common=common, script=script)


@cache
def digest(name: str) -> str:
    """Return the name that the server gives a script."""
    return hashlib.sha1(load(name).encode(), usedforsecurity=False).hexdigest()
