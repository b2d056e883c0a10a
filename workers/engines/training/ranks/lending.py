"""Lends a sharded state to one buffer: each rank copies its own pieces into its file.

    rank 0    live.lend(pages)    Lend goes to all ranks: each notes its pieces, and changes none before they are copied
    rank R    a thread            copies its pieces into the file, and then writes the turn into FILE.rank-R
    rank 0    loan.copy()         copies its own pieces, and waits for these files

The ranks of a worker share a host, and the file holds whole tensors, like a gathered state. A
rank's piece of a tensor is a contiguous range of its elements. So nothing travels between ranks,
and a snapshot can be resumed with another number of ranks. Random generator states and step counts
are rank 0's."""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from pipeline.process import work
from pipeline.training.live_states import BufferPages, LiveState, OpenLoans, StateLoan
from pipeline.weights.tensorfile import TensorSpec, in_order
from protocol.errors import StorageFailed
from workers.engines.model.checkpoint_files import STEP, TrainingState, rng_tensors
from workers.engines.model.live_state import WEIGHT, copy_of
from workers.engines.model.weights_file import spec_of
from workers.engines.training.ranks.group import Group
from workers.engines.training.ranks.messages import Command, Lead, Lend

_LOOK_S = 0.003
_LIMIT_S = 50.0
"""How long rank 0 waits for the next of the others; shorter than the loan's own limit."""
_FAILURES = (OSError, MemoryError, RuntimeError)


@dataclass(frozen=True, slots=True)
class ShareRange:
    """A rank's part of one tensor: a contiguous range of its elements."""

    start: int
    """Index of the first element in the whole tensor."""
    numbers: torch.Tensor
    """[n], a view of live memory."""


class LentShards(Protocol):
    @property
    def num_steps(self) -> int: ...

    def kinds(self, name: str) -> Sequence[str]: ...

    def piece(self, name: str, key: str = "") -> ShareRange | None:
        """Return this rank's piece of a parameter, or of its state of kind ``key``; None without
        one."""
        ...


class ShareLender:
    def __init__(
        self,
        shards: LentShards,
        group: Group,
        lead: Lead,
        *,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
    ) -> None:
        """``shapes`` are those of whole trained parameters."""
        self._shards, self._group, self._lead = shards, group, lead
        self._shapes, self._dtype = shapes, dtype
        self.loans = OpenLoans()
        self._labels: list[str] = []
        self._specs: list[TensorSpec] = []
        self._own: _OwnPieces | None = None

    def live_state(self, state: TrainingState, obey: Callable[[Command], Any]) -> LiveState:
        """Return the state for an exact resume as whole tensors; on rank 0."""
        own = rng_tensors()
        if self._shards.num_steps:
            count = torch.tensor(float(self._shards.num_steps))
            own |= {f"{STEP}/{name}": count for name in self._shapes if STEP in self._shards.kinds(name)}
        shared = self._shared_specs()
        specs = tuple(in_order([*shared, *(spec_of(label, tensor, tensor.dtype) for label, tensor in own.items())]))
        turn = secrets.token_hex(8)

        def begin(loan: StateLoan, pages: BufferPages) -> None:
            starts = {spec.name: start for spec, start in zip(specs, pages.starts, strict=True)}
            places = {spec.name: starts[spec.name] for spec in shared}
            self.loans.add(loan)
            self._lead.run(Lend(str(pages.path), turn, places), obey)

        def copy(pages: BufferPages) -> None:
            pieces, self._own = self._own, None
            assert pieces is not None, "a loan has begun"
            by_label = {spec.name: page for spec, page in zip(specs, pages.arrays, strict=True)}
            for label, tensor in own.items():
                by_label[label][:] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            pieces.copy(by_label)
            self._wait_for_others(pages.path, turn)

        return LiveState(specs, msgspec.json.encode(state).decode(), copy, begin)

    def lend(self, command: Lend) -> None:
        pieces = self._pieces(command.places)
        if self._group.is_lead:
            # whoever holds the loan copies them
            self._own = pieces
            return
        loan = StateLoan(partial(self._copy_share, command, pieces))
        self.loans.add(loan)
        self._thread.submit(loan.copy)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="share")

    def _shared_specs(self) -> list[TensorSpec]:
        """Return what the ranks copy: weights and their states, except the step counts."""
        labels = [(f"{WEIGHT}{name}", name) for name in self._shapes]
        if self._shards.num_steps:
            labels += [
                (f"{key}/{name}", name) for name in self._shapes for key in self._shards.kinds(name) if key != STEP
            ]
        if [label for label, _ in labels] != self._labels:
            self._labels = [label for label, _ in labels]
            self._specs = [
                spec_of(label, torch.empty(self._shapes[name], dtype=self._dtype, device="meta"), self._dtype)
                for label, name in labels
            ]
        return self._specs

    def _pieces(self, places: Mapping[str, int]) -> _OwnPieces:
        found: list[tuple[str, ShareRange]] = []
        with torch.no_grad():
            for label in places:
                kind, _, name = label.partition("/")
                piece = self._shards.piece(name, "" if f"{kind}/" == WEIGHT else kind)
                if piece is not None and piece.numbers.numel():
                    found.append((label, piece))
        return _OwnPieces(found)

    def _copy_share(self, command: Lend, pieces: _OwnPieces) -> None:
        """Copy this rank's pieces, and report success or failure to rank 0."""
        path, failure = Path(command.path), ""
        try:
            with path.open("r+b") as file:
                data = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
            pieces.copy({label: data[start:] for label, start in command.places.items()})
        except _FAILURES as error:
            failure = repr(error)
        told = _file_of(path, self._group.rank)
        partial_file = told.with_name(f"{told.name}.partial")
        partial_file.write_text(f"{command.turn} {failure}", encoding="utf-8")
        partial_file.replace(told)

    def _wait_for_others(self, path: Path, turn: str) -> None:
        """Wait until each rank has copied its pieces. Raises StorageFailed if one fails or is late."""
        waiting, since_s = set(range(1, self._group.size)), time.monotonic()
        while waiting:
            for rank in sorted(waiting):
                of, _, failure = _read(_file_of(path, rank)).partition(" ")
                if of != turn:
                    continue
                if failure:
                    raise StorageFailed(f"rank {rank} could not copy its share: {failure}")
                waiting.remove(rank)
                since_s = time.monotonic()
                work.step()
            if waiting and time.monotonic() - since_s > _LIMIT_S:
                raise StorageFailed(f"rank {min(waiting)} has not copied its share within {_LIMIT_S:g} s")
            if waiting:
                time.sleep(_LOOK_S)


class _OwnPieces:
    def __init__(self, pieces: Sequence[tuple[str, ShareRange]]) -> None:
        self._pieces = pieces
        self._copy_into = copy_of([piece.numbers for _, piece in pieces])

    def copy(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Copy the pieces into whole tensors by label, each uint8 [at least its bytes]."""
        self._copy_into(_view(tensors[label], piece) for label, piece in self._pieces)


def _view(data: np.ndarray, piece: ShareRange) -> torch.Tensor:
    size = piece.numbers.element_size()
    start = piece.start * size
    return torch.from_numpy(data[start : start + piece.numbers.numel() * size]).view(piece.numbers.dtype)


def _file_of(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank-{rank}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
