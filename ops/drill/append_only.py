"""Reads the append-only file of a Redis or Valkey server as transactions.

Each command is ``*<n>`` and n times ``$<length>`` with that many bytes. Lines end in CRLF
(https://valkey.io/topics/protocol). MULTI and EXEC enclose the commands of one transaction. A part that was cut
short by a crash is ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from protocol.errors import DataError

Command = list[bytes]


def read_transactions(folder: Path) -> Iterator[list[Command]]:
    """Yield the commands of each transaction; a command outside of one is a transaction by itself.

    Raises DataError if the server has rewritten its file, which loses the earlier effects."""
    files = _files(folder)
    pending: list[Command] | None = None
    for command in (command for file in files for command in _commands(file.read_bytes())):
        word = command[0].upper()
        if word == b"MULTI":
            pending = []
        elif word == b"EXEC":
            if pending:
                yield pending
            pending = None
        elif word == b"SELECT":
            continue
        elif pending is None:
            yield [command]
        else:
            pending.append(command)


def _files(folder: Path) -> list[Path]:
    """Return the files in order: one before Redis 7; since then a manifest names an (empty) base and the
    increments."""
    single = folder / "appendonly.aof"
    if single.is_file():
        return [single]
    parts = folder / "appendonlydir"
    manifest = next(parts.glob("*.manifest"), None)
    if manifest is None:
        raise DataError(f"{folder} has no append-only file; a drill needs a run that starts its own ledger server")
    rows = [line.split() for line in manifest.read_text().splitlines() if line.startswith("file ")]
    entries = [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
    if any(entry["type"] == "h" or (entry["type"] == "b" and entry["seq"] != "1") for entry in entries):
        raise DataError(
            f"{manifest} was rewritten by the server, so the earlier history is lost; make the drill shorter"
        )
    return [parts / entry["file"] for entry in entries if entry["type"] == "i"]


def _commands(data: bytes) -> Iterator[Command]:
    at = 0
    while (start := _line(data, _after_zeros(data, at), b"*")) is not None:
        count, at = start
        command: Command = []
        for _ in range(count):
            length = _line(data, at, b"$")
            if length is None or length[1] + length[0] + 2 > len(data):
                return
            size, begin = length
            command.append(data[begin : begin + size])
            at = begin + size + 2
        yield command


def _after_zeros(data: bytes, at: int) -> int:
    """Return the end of a hole that a write on a full disk has left; it has no effect."""
    while data[at : at + 1] == b"\0":
        at += 1
    return at


def _line(data: bytes, at: int, mark: bytes) -> tuple[int, int] | None:
    """Return the number in the line at ``at`` and where the next line begins; None at the end. Skips comments
    (``#``)."""
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        if data[at : at + 1] != b"#":
            break
        at = end + 2
    if data[at : at + 1] != mark:
        raise DataError(f"byte {at} of the append-only file is {data[at : at + 1]!r}, expected {mark!r}")
    return int(data[at + 1 : end]), end + 2
