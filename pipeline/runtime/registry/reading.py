"""Reads the registry's entries, which any worker's token may write.

Unreadable entries are skipped, logged once and named, so that one bad value does not stop its reader."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog

from pipeline.runtime.registry.contract import Drain, Eviction, Fleet, Heartbeat
from protocol.ids import Role
from protocol.printable import printable_line

T = TypeVar("T")

MAX_NAMED: Final = 256
"""Skipped entries that are named; further ones are only counted."""
_MAX_NAME_CHARS = 80
_MAX_WHY_CHARS = 200
_MAX_INTEGER: Final = 1 << 63
_MAX_EPOCH_DIGITS: Final = 15
"""Most digits of a valid epoch, as in ``epochs.lua``."""
_LATEST_S: Final = 1e11
"""Times beyond this, or before 1970, are invalid."""
_LONG_NUMBER: Final = re.compile(rb"\d{19}")

log = structlog.get_logger(__name__)


class EntryReader:
    """Decodes entries, and remembers those that it had to skip."""

    def __init__(self) -> None:
        self._unreadable: dict[str, str] = {}
        self.num_dropped = 0
        """Unreadable entries, each counted once until it is readable again."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        return self._unreadable

    def value(self, key: str, name: bytes | str, blob: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
        """Return an entry's value; None when it is unreadable. ``name`` is its worker's, or ""."""
        try:
            found = decoder.decode(blob)
            if _LONG_NUMBER.search(blob):
                _check_numbers(msgspec.to_builtins(found))
        # RecursionError: deeply nested brackets
        except (ValueError, RecursionError) as error:
            self.drop(key, name, str(error))
            return None
        self._readable(key, name)
        return found

    def heartbeat(self, name: bytes, blob: bytes, decoder: msgspec.json.Decoder[Heartbeat]) -> Heartbeat | None:
        """Return a worker's heartbeat; None when it is unreadable or another worker's."""
        beat = self.value("heartbeats", name, blob, decoder)
        if beat is None:
            return None
        times = (beat.at_s, beat.started_s, beat.progress_at_s, beat.turned_at_s, beat.moved_at_s, beat.still_s)
        why = ""
        if beat.who.worker.encode("utf-8", "replace") != name:
            why = f"it is of {beat.who.worker}"
        elif not all(0.0 <= at_s < _LATEST_S for at_s in times) or not 0 <= beat.pid < 1 << 31:
            why = "a time or the process id is out of range"
        if why:
            self.drop("heartbeats", name, why)
            return None
        return beat

    def name(self, key: str, name: bytes) -> str | None:
        """Return a worker's name; None if the bytes are not text."""
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            self.drop(key, name, str(error))
            return None

    def arrival(self, name: bytes, at: object) -> float | None:
        """Return a time of arrival in seconds since 1970; None if it is invalid."""
        seconds = float(at) if isinstance(at, (bytes, str, float, int)) else math.nan
        if not math.isfinite(seconds) or not 0.0 <= seconds < _LATEST_S:
            self.drop("seen", name, f"{seconds} is not a time")
            return None
        return seconds

    def epoch(self, name: bytes | str, found: bytes) -> int:
        """Return a worker's epoch; 0 if it is invalid."""
        if found.isdigit() and len(found) <= _MAX_EPOCH_DIGITS:
            self._readable("epochs", name)
            return int(found)
        self.drop("epochs", name, f"{found[:40]!r} is not an epoch")
        return 0

    def drop(self, key: str, name: bytes | str, why: str) -> None:
        entry = _entry(key, name)
        if entry in self._unreadable:
            return
        self.num_dropped += 1
        if len(self._unreadable) < MAX_NAMED:
            self._unreadable[entry] = why[:_MAX_WHY_CHARS]
            log.warning("registry_entry_dropped", entry=entry, why=why[:_MAX_WHY_CHARS])

    def _readable(self, key: str, name: bytes | str) -> None:
        if self._unreadable:
            self._unreadable.pop(_entry(key, name), None)


def _entry(key: str, name: bytes | str) -> str:
    text = name if isinstance(name, str) else name.decode(errors="backslashreplace")
    return f"{key} of {printable_line(text[:_MAX_NAME_CHARS])}" if text else key


def _check_numbers(value: Any) -> None:
    """Raise ValueError for an integer that no counter reaches."""
    if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        raise ValueError("a number is out of range")
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, (list, tuple)):
        for part in cast("Sequence[Any]", value):
            _check_numbers(part)


_BY_HAND: Final = "by_hand"
_DEMAND: Final = "demand"
_DRAINS: Final = "drains"
_EVICTIONS: Final = "evictions"
_CHECK: Final = "check"
_fleet_fields = msgspec.json.Decoder(dict[str, int | str])


def encoded(fleet: Fleet) -> bytes:
    """Encode a fleet as one JSON object: its counts by role, and its other fields."""
    more = ({_BY_HAND: 1} if fleet.is_by_hand else {}) | ({_DEMAND: fleet.demand} if fleet.demand else {})
    if fleet.drains:
        more |= {_DRAINS: " ".join(f"{one.worker}#{one.epoch}{'+' * one.is_replaced}" for one in fleet.drains)}
    if fleet.evictions:
        more |= {_EVICTIONS: msgspec.json.encode(fleet.evictions).decode()}
    if fleet.check:
        more |= {_CHECK: fleet.check}
    return msgspec.json.encode({str(role): count for role, count in fleet.counts.items()} | more)


def decoded(blob: bytes) -> Fleet:
    found = _fleet_fields.decode(blob)
    by_hand, demand = bool(found.pop(_BY_HAND, 0)), str(found.pop(_DEMAND, ""))
    drains = tuple(map(_drain, str(found.pop(_DRAINS, "")).split()))
    evictions = msgspec.json.decode(str(found.pop(_EVICTIONS, "[]")), type=tuple[Eviction, ...])
    check = int(found.pop(_CHECK, 0))
    return Fleet({Role(role): int(count) for role, count in found.items()}, by_hand, demand, drains, evictions, check)


def _drain(text: str) -> Drain:
    worker, _, epoch = text.removesuffix("+").rpartition("#")
    return Drain(worker, int(epoch), text.endswith("+"))
