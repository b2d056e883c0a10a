"""The learned state of an emulated optimiser: its number of steps, and a digest of all batches in order.

So a run that trains on a batch twice, or loses one, ends with other weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from pipeline.training.live_states import LiveState
from pipeline.training.snapshots import KeptState
from protocol.errors import DataError

STATE_FILE = "emulated.json"


class LearnedState(msgspec.Struct, frozen=True):
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
        """Return the state as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: bytes, path: Path) -> LearnedState:
        """Read a state's JSON, which came from ``path``. Raises DataError naming that."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} cannot be read: {error}; resume from another checkpoint") from error


class EmulatedLearner:
    """The state of an emulated backend, with the checkpoints and snapshots that the seams require."""

    def __init__(self) -> None:
        self.state = LearnedState()

    def snapshot(self) -> Callable[[Path], None]:
        """Return a function that writes the current state as ``emulated.json``; it raises OSError."""
        return self.state.save

    def load(self, folder: Path) -> None:
        """Restore a snapshot. If it cannot, raises DataError and changes nothing."""
        self.state = LearnedState.load(folder)

    def live_state(self) -> LiveState:
        """Return the state, which has no tensors."""
        return LiveState((), self.state.text(), lambda pages: None)

    def put_back(self, kept: KeptState) -> None:
        """Restore a ``live_state``. If it cannot, raises DataError and changes nothing."""
        self.state = LearnedState.parse(kept.note.encode(), kept.path)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
