"""The learned state of an emulated optimiser: its steps, and a digest of all batches in order.

So a run that trains on a batch twice, or loses one, ends with other weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from protocol.errors import DataError

STATE_FILE = "emulated.json"


class LearnedState(msgspec.Struct, frozen=True):
    """State after some steps."""

    num_steps: int = 0
    digest: str = ""
    """Hexadecimal, over all batches; empty before the first."""

    def after(self, batch: Iterable[bytes]) -> LearnedState:
        """Return the state after a step on ``batch``."""
        state = hashlib.blake2b(bytes.fromhex(self.digest), digest_size=16)
        for part in batch:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return LearnedState(self.num_steps + 1, state.hexdigest())

    def save(self, folder: Path) -> None:
        """Write it into ``folder``. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE_FILE).write_text(self.text())

    @classmethod
    def load(cls, folder: Path) -> LearnedState:
        """Read a state that ``save`` wrote. Raises DataError naming the file."""
        path = folder / STATE_FILE
        try:
            return cls.parse(path.read_bytes(), path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error

    def text(self) -> str:
        """Return it as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: bytes, path: Path) -> LearnedState:
        """Read a state's JSON, which ``path`` has. Raises DataError naming it."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error
