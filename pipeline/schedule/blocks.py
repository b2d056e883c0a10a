"""The work of one micro-batch: blocks on devices, and what must come before what.

A block runs on all its devices at once, and a device runs one block at a time. Memory that a block takes is held from
its start, memory that it gives back is free at its end; both count on each of its devices. A dependency of distance
``d`` lets a block of micro-batch ``m`` wait for a block of micro-batch ``m - d``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import msgspec

from protocol.errors import ConfigError


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of a micro-batch's work, such as the forward pass of a stage.

    Example:
        ``Block("f0", 1, 1, (0,))`` runs for 1 on device 0 and keeps 1 unit of activations."""

    name: str
    span: int
    """How long it runs, in any unit of time that all blocks share. Above 0."""
    memory: int = 0
    """Change of the memory that is held, on each of its devices, in any unit that all blocks share."""
    devices: tuple[int, ...] = (0,)
    """Devices that it occupies together, counted from 0."""


class Dependency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``after`` starts when ``before``, of the micro-batch ``distance`` earlier, has ended."""

    before: str
    after: str
    distance: int = 0


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """All blocks of one micro-batch. ``check`` says what is wrong with one that a person wrote."""

    name: str
    num_devices: int
    blocks: tuple[Block, ...]
    dependencies: tuple[Dependency, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, Block]:
        return {block.name: block for block in self.blocks}

    @cached_property
    def index(self) -> Mapping[str, int]:
        return {block.name: place for place, block in enumerate(self.blocks)}

    @cached_property
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """The dependencies as (before, after, distance), blocks by their place."""
        return tuple((self.index[each.before], self.index[each.after], each.distance) for each in self.dependencies)

    @cached_property
    def on_device(self) -> tuple[tuple[int, ...], ...]:
        """The places of each device's blocks."""
        devices = range(self.num_devices)
        return tuple(tuple(i for i, block in enumerate(self.blocks) if device in block.devices) for device in devices)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The places of the blocks, each after those that it waits for within a micro-batch. Raises ConfigError."""
        waits: dict[int, set[int]] = {place: set() for place in range(len(self.blocks))}
        for before, after, distance in self.edges:
            if not distance:
                waits[after].add(before)
        try:
            return tuple(TopologicalSorter(waits).static_order())
        except CycleError as error:
            circle = " -> ".join(self.blocks[place].name for place in error.args[1])
            raise ConfigError(
                f"{self.name}: blocks wait for one another in a circle: {circle}; take a dependency away, or give it a "
                "distance of 1 or more if it is of an earlier micro-batch"
            ) from None

    def check(self) -> Placement:
        """Return itself. Raises ConfigError for work that cannot be scheduled with any memory."""
        self.check_names()
        assert self.order
        return self

    def check_names(self) -> None:
        """Raise ConfigError for blocks or dependencies that are wrong by themselves, without a look for circles."""
        where = self.name
        if self.num_devices < 1 or not self.blocks:
            raise ConfigError(f"{where}: expected at least one device and one block")
        if len(self.index) < len(self.blocks):
            twice = next(block.name for place, block in enumerate(self.blocks) if self.index[block.name] != place)
            raise ConfigError(f"{where}: two blocks are called {twice!r}; expected a name of its own for each")
        for block in self.blocks:
            if block.span < 1:
                raise ConfigError(f"{where}: block {block.name!r} has span {block.span}; expected 1 or more")
            if not block.devices or len(set(block.devices)) < len(block.devices):
                raise ConfigError(f"{where}: block {block.name!r} has devices {block.devices}; expected each once")
            if not all(0 <= device < self.num_devices for device in block.devices):
                raise ConfigError(
                    f"{where}: block {block.name!r} has devices {list(block.devices)}; expected 0 to {self.num_devices - 1}"
                )
        for each in self.dependencies:
            for name in (each.before, each.after):
                if name not in self.index:
                    raise ConfigError(
                        f"{where}: a dependency names block {name!r}; expected one of {', '.join(self.index)}"
                    )
            if each.distance < 0:
                raise ConfigError(
                    f"{where}: {each.after!r} waits for {each.before!r} at distance {each.distance}; expected 0 or more"
                )

    def work(self, device: int) -> int:
        """Return how long a device is busy with one micro-batch."""
        return sum(self.blocks[place].span for place in self.on_device[device])


def chain(name: str, num_devices: int, *rows: tuple[Block, ...]) -> Placement:
    """Return a placement of one or more chains of blocks, each waiting for the one before it. Chains may share blocks."""
    blocks = dict.fromkeys(block for row in rows for block in row)
    pairs = dict.fromkeys((a.name, b.name) for row in rows for a, b in pairwise(row))
    return Placement(name, num_devices, tuple(blocks), tuple(Dependency(a, b) for a, b in pairs))
