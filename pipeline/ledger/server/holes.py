"""Removes holes from an append-only file, so that a server accepts it again.

After rewriting its file, a server continues in a file that it did not open for appending. When a full disk
cuts a write short, the server truncates the file, but keeps its position in it. The next write leaves a hole
of zeros between two commands (seen with Valkey 9.1.2), and servers refuse such a file as badly formed.

Removing a hole loses nothing, since the bytes that were cut are written again after it. Zeros inside a
command are data. Other damage is left alone.

Source: https://valkey.io/topics/persistence; commands are ``*<n>`` and n times ``$<length>``, with that many
bytes (https://valkey.io/topics/protocol)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

_COPIED_BYTES = 1 << 20
_SUFFIX = ".without-holes"


def take_out_holes(ledger: Path) -> int:
    """Remove the holes from the files of a ledger's folder; return their size in bytes.

    No server may run or start there meanwhile. Each file is replaced atomically. Raises OSError for lack of
    space or permission; the file is then unchanged."""
    files = [ledger / "appendonly.aof", *sorted(ledger.glob("appendonlydir/*.aof"))]
    return sum(_mended(path) for path in files if path.is_file() and path.stat().st_size)


def _mended(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        holes = list(holes_of(data))
        if not holes:
            return 0
        copy = path.with_name(path.name + _SUFFIX)
        try:
            _write_rest(data, holes, copy, path.stat().st_mode & 0o777)
            copy.replace(path)
        finally:
            copy.unlink(missing_ok=True)
    return sum(end - begin for begin, end in holes)


def _write_rest(data: mmap.mmap, holes: Sequence[tuple[int, int]], copy: Path, mode: int) -> None:
    with os.fdopen(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        places = [0, *(place for hole in holes for place in hole), len(data)]
        for begin, end in list(pairwise(places))[::2]:
            for at in range(begin, end, _COPIED_BYTES):
                file.write(data[at : min(end, at + _COPIED_BYTES)])
        file.flush()
        os.fsync(file.fileno())


def holes_of(data: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of zeros where a command should begin.

    Stops at the first other damage, and at once in a file of another kind."""
    at, size = 0, len(data)
    while at < size:
        mark = data[at]
        if mark == 0:
            end = _end_of_zeros(data, at)
            yield at, end
            at = end
        elif mark == ord("#"):
            line = data.find(b"\r\n", at)
            at = size if line < 0 else line + 2
        elif (after := _after_command(data, at)) is None:
            return
        else:
            at = after


def _end_of_zeros(data: bytes | mmap.mmap, at: int) -> int:
    while at < len(data):
        piece = data[at : at + 4096]
        rest = piece.lstrip(b"\0")
        at += len(piece) - len(rest)
        if rest:
            break
    return at


def _after_command(data: bytes | mmap.mmap, at: int) -> int | None:
    """Return where the command at an offset ends; None when it is damaged or cut short."""
    count = _number(data, at, b"*")
    if count is None:
        return None
    num, at = count
    for _ in range(num):
        length = _number(data, at, b"$")
        if length is None:
            return None
        at = length[1] + length[0]
        if data[at : at + 2] != b"\r\n":
            return None
        at += 2
    return at


def _number(data: bytes | mmap.mmap, at: int, mark: bytes) -> tuple[int, int] | None:
    end = data.find(b"\r\n", at, at + 32)
    digits = data[at + 1 : end]
    return (int(digits), end + 2) if end > 0 and data[at : at + 1] == mark and digits.isdigit() else None
