"""A set of which the smallest item is found at once, for queues of names. Adding and removing take a logarithm of
its size."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SortedSet(Generic[T]):
    """Names, each at most once, smallest first."""

    __slots__ = ("_heap", "_items")

    def __init__(self) -> None:
        self._items: set[T] = set()
        self._heap: list[Any] = []
        """All items, and some that were removed since."""

    def add(self, item: T) -> None:
        """Insert an item once."""
        if item not in self._items:
            self._items.add(item)
            heappush(self._heap, item)
            if len(self._heap) > 64 + 2 * len(self._items):
                self._heap = [*self._items]
                heapify(self._heap)

    def discard(self, item: T) -> bool:
        """Remove an item; return whether it was there."""
        if item in self._items:
            self._items.remove(item)
            return True
        return False

    @property
    def first(self) -> T | None:
        """The smallest item; None when empty."""
        while self._heap and self._heap[0] not in self._items:
            heappop(self._heap)
        return self._heap[0] if self._heap else None

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        items: Any = self._items
        return iter(sorted(items))

    def __len__(self) -> int:
        return len(self._items)
