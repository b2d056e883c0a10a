"""The ledger's transitions as Lua, one script each; ``common.lua`` is put before every one.

*Consumes* nothing. *Produces* script texts. *Waits for* nothing. Each script's header names its keys, arguments and answer.
"""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def load(name: str) -> str:
    """Return the whole text of a script, ``common.lua`` included."""
    folder = resources.files(__name__)
    return folder.joinpath("common.lua").read_text("utf-8") + folder.joinpath(f"{name}.lua").read_text("utf-8")
