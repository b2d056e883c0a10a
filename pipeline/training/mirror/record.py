"""``<run_dir>/mirror.json``: how far copying is, for ``headrace status`` and the supervisor.

The copying process writes it while it works, the supervisor when it has ended that process."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from pipeline.files import write_private

RECORD_NAME: Final = "mirror.json"
_MB: Final = 1e6


class MirrorState(StrEnum):
    """The state of the last copy that was begun."""

    COPYING = "copying"
    DONE = "done"
    FAILED = "failed"
    """It is tried again."""
    REFUSED = "refused"
    """It is tried again, rarely: bucket or credentials are wrong."""
    TAKEN_OVER = "taken over"
    """Another supervisor writes copies there; this one has stopped."""


class MirrorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a run's copies."""

    url: str
    """Where the run's copies are."""
    state: MirrorState = MirrorState.DONE
    at_s: float = 0.0
    checkpoint: str = ""
    """Checkpoint of the last copy that was begun."""
    started_s: float = 0.0
    done_bytes: int = 0
    """Bytes that are there, of ``total_bytes`` that this copy has to move."""
    total_bytes: int = 0
    num_done: int = 0
    """Steps done of any kind: bytes read, moved, or objects looked up."""
    copied: str = ""
    """Checkpoint of the newest complete copy."""
    copied_s: float = 0.0
    reason: str = ""
    """Why the last copy failed, in words."""

    def in_words(self, now_s: float) -> str:
        """Return a sentence for people."""
        newest = f"{self.copied}, {_ago(now_s - self.copied_s)}" if self.copied else "none yet"
        head = f"copies at {self.url}: {newest}"
        if self.state is MirrorState.COPYING:
            share = self.done_bytes / self.total_bytes if self.total_bytes else 0.0
            elapsed_s = max(now_s - self.started_s, 0.001)
            rate = self.done_bytes / elapsed_s / _MB
            size = f"{self.total_bytes / _MB:,.0f} MB"
            return f"{head}; copying {self.checkpoint}: {100 * share:.0f} % of {size}, {rate:.1f} MB/s"
        if self.state is MirrorState.DONE:
            return head
        again = "" if self.state is MirrorState.TAKEN_OVER else "; it is tried again"
        return f"{head}; {self.checkpoint or 'the newest checkpoint'} is not copied: {self.reason}{again}"


def write_record(run_dir: Path, record: MirrorRecord) -> None:
    """Write the record in one step. Raises OSError."""
    write_private(run_dir / RECORD_NAME, msgspec.json.encode(record))


def read_record(run_dir: Path) -> MirrorRecord | None:
    """Return the record; None when nothing was ever copied, or it cannot be read."""
    try:
        return msgspec.json.decode((run_dir / RECORD_NAME).read_bytes(), type=MirrorRecord)
    except (OSError, ValueError, RecursionError):
        return None


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0, round(seconds))} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 5400 else f"{seconds / 3600:.1f} h ago"
