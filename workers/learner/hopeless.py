"""Whether nothing can be learned from the data, however long one waits. A pure state machine.

Data is hopeless when so many groups in a row were dropped because nothing could be learned from
them, and the learner really lacks units:

    counted     since the last unit that became ready: one good group begins the count anew
    judged      only while fewer units are ready than a batch needs; never while late work is waited
                for, or while an operator has paused admission
    certain     only when all that was in flight as the limit was reached came to nothing, too

Beside these, claims are counted that held no token to train on: a rule may want right responses, or
guidance.

So a generator that was cut off, and whose groups are late, ends no run: other generators sample its
groups first."""

from __future__ import annotations

from collections import Counter

from pipeline.ledger.types import ClaimRefused, ClaimWait, DropReason, Totals

UNUSABLE = (DropReason.NO_SIGNAL, DropReason.DEAD_LETTER)
"""Drops with nothing left to learn from a group; any other reason blames the run, not the data."""


class HopelessData:
    """Judges refusal after refusal; ``max_groups`` unusable ones in a row are borne (0: any)."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._begin: Counter[str] | None = None
        self._num_ready = 0
        self._admitted: int | None = None
        """Above the numbers of the groups that were admitted when the limit was reached."""
        self.num_unusable = 0
        """Groups in a row with nothing to learn from."""
        self.num_untrained = 0
        """Groups of claims in a row that held no token to train on."""

    def claimed(self) -> None:
        """Take note that a batch was claimed: there was something to learn from."""
        self._begin = None
        self.num_unusable = 0

    def untrained(self, num_groups: int) -> None:
        """Take note that a claimed batch of so many groups held no token to train on."""
        self.num_untrained += num_groups
        self.num_unusable = self.num_untrained

    def trained(self) -> None:
        """Take note that a claimed batch was trained on."""
        self.num_untrained = 0

    @property
    def is_untrainable(self) -> bool:
        """Whether too many claims in a row held no token to train on."""
        return bool(self._max_groups) and self.num_untrained >= self._max_groups

    def look(self, refused: ClaimRefused, totals: Totals) -> Counter[str] | None:
        """Return the row's unusable groups by reason when the data is hopeless, else None;
        ``totals`` were read after the refusal."""
        dropped = totals.num_groups_dropped
        unusable = Counter({reason.value: dropped.get(reason, 0) for reason in UNUSABLE})
        if self._begin is None or totals.num_ready_units != self._num_ready:
            self._begin, self._num_ready, self._admitted = unusable, totals.num_ready_units, None
        row = unusable - self._begin
        self.num_unusable = row.total()
        lacks_units = refused.wait is ClaimWait.NOT_ENOUGH and totals.num_ready_units < refused.num_needed
        lacks_units = lacks_units and totals.paused is None
        if not self._max_groups or row.total() < self._max_groups or not lacks_units:
            return None
        if self._admitted is None:
            self._admitted = totals.next_group
            return None
        oldest = refused.oldest_running
        return None if oldest is not None and _group(oldest) < self._admitted else row


def _group(unit: str) -> int:
    """Return the number of a unit's group: ``12`` of ``12``, of ``t.12.3`` and of ``t.12.3.0``."""
    return int(unit.split(".")[1] if "." in unit else unit)
