"""The command that a launcher runs elsewhere, and the end of its output."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.ledger.token import Token
from protocol.ids import Role

TokenOf = Callable[[Role], Token]
"""Returns the token of a role; called at each start, so that a rotated token is used."""
_WORKER = re.compile(r"([a-z]+)-\d+")


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """``headrace fleet join`` for the workers of one run."""

    run: str
    url: str
    """The ledger's address as seen from there, without user and password."""
    token_of: TokenOf
    program: tuple[str, ...] = ("headrace",)
    allows_plaintext: bool = False
    """Whether the connection may be unencrypted."""

    def words(self, role: Role, worker: str, token_file: str) -> list[str]:
        """Return the command line. The secret is only in ``token_file``."""
        return [*self.program, *join_words(self.url, token_file, role, worker, plaintext=self.allows_plaintext)]


def join_words(url: str, token_file: str, role: Role, worker: str, *, plaintext: bool) -> list[str]:
    """Return the arguments of ``headrace`` for one worker to join; its name comes last."""
    allowed = ["--allow-plaintext"] if plaintext else []
    return ["fleet", "join", url, *allowed, "--token", token_file, "--role", str(role), "--name", worker]


def role_of(worker: str) -> Role | None:
    """Return the role in a launched worker's name such as ``generator-3``; None for any other name."""
    found = _WORKER.fullmatch(worker)
    roles = {str(role): role for role in Role}
    return roles.get(found[1]) if found else None


_TAIL_BYTES = 64 << 10
NUM_LINES = 20


def last_lines(path: Path) -> str:
    """Return a file's last 20 lines, from at most 64 KiB; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-NUM_LINES:])
