"""A set in ascending order, for queues of names.

Adding and removing move at most a list's tail: about a microsecond for a ledger's thousands."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class SortedSet(Generic[T]):
    """Names, each at most once, smallest first."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[T] = []

    def add(self, item: T) -> None:
        """Insert an item once."""
        at = bisect_left(self._items, item)  # type: ignore[type-var]
        if at == len(self._items) or self._items[at] != item:
            self._items.insert(at, item)

    def discard(self, item: T) -> bool:
        """Remove an item; return whether it was there."""
        at = bisect_left(self._items, item)  # type: ignore[type-var]
        if at < len(self._items) and self._items[at] == item:
            del self._items[at]
            return True
        return False

    @property
    def first(self) -> T | None:
        """The smallest item; None when empty."""
        return self._items[0] if self._items else None

    def __contains__(self, item: T) -> bool:
        at = bisect_left(self._items, item)  # type: ignore[type-var]
        return at < len(self._items) and self._items[at] == item

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
