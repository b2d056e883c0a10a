"""``headrace fleet tokens``: let other hosts join a run, and shut them out again.

A secret is written only into a file of mode 0600. ``pipeline.ledger.token`` and
``pipeline.ledger.redis.tokens`` explain tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, aligned, answer, json_option, run_among, run_argument
from pipeline.operator.attached import Attached, attach, look_at, workers_of
from protocol.errors import ConfigError
from protocol.ids import ELASTIC_ROLES, Role
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.ledger.redis.tokens import TokenRow
    from pipeline.ledger.token import Token

_ROLES = tuple(map(str, (*ELASTIC_ROLES, Role.VALUE, Role.LEARNER)))
_OVERLAP_S = 600.0


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n  headrace fleet tokens create --role generator\n  headrace fleet tokens list",
)
def tokens() -> None:
    """Create, list, revoke and rotate the tokens with which other hosts join a run.

    A token is for one run and one role: a user of the ledger's server without access to other runs."""


@tokens.command(
    epilog="""\b
Examples:
  headrace fleet tokens create --role generator
  headrace fleet tokens create --role reward --out reward.token runs/demo

Copy the file to the other host, with mode 0600. There: headrace fleet join LEDGER_URL --token FILE.
Any number of hosts may use one token."""
)
@run_argument
@click.option("--role", type=click.Choice(_ROLES), required=True, help="Role of the workers that may join.")
@click.option("--out", type=PATH, help="The token's file. Default: RUN/tokens/TOKEN.token")
@json_option
def create(run: Path | None, role: str, out: Path | None, as_json: bool) -> None:
    """Create a token for workers of one role."""
    if out is not None and out.exists():
        raise ConfigError(
            f"--out {out} exists already; expected a new file, since a token's secret is kept nowhere else"
        )

    async def make() -> tuple[Token, Path, str]:
        async with attach(run) as at:
            token = await at.tokens.create(Role(role), ca=_authority(at))
            try:
                path = _write(at, token, out)
            except BaseException:
                # a token without its file is useless
                await at.tokens.revoke(token.id)
                raise
            return token, path, at.config.wire.transport

    token, path, transport = asyncio.run(make())
    lines = [f"token {token.id} for {token.role} workers of {token.run}: {path}", _REMEDY.format(path=path)]
    if transport != "tcp":
        lines.append(
            f"the run's mailboxes use {transport}, which no other host can reach; start the run with wire.transport=tcp"
        )
    answer(as_json, _shown(token, path), *lines)


_REMEDY = "copy it to the other host, with mode 0600; there: headrace fleet join LEDGER_URL --token {path.name}"


@tokens.command(
    name="list", epilog="\b\nExamples:\n  headrace fleet tokens list\n  headrace fleet tokens list runs/demo --json"
)
@run_argument
@json_option
def list_(run: Path | None, as_json: bool) -> None:
    """List a run's tokens, oldest first.

    Hosts are those that joined over tcp; connections are the current ones to the ledger's server."""

    async def read() -> list[TokenRow]:
        async with look_at(run) as at:
            return await at.tokens.rows()

    rows = asyncio.run(read())
    answer(
        as_json, rows, *(_table(rows) if rows else ["no tokens; `headrace fleet tokens create --role ROLE` makes one"])
    )


def _table(rows: Sequence[TokenRow]) -> list[str]:
    from pipeline.fleet.why.types import seconds

    now_s = time.time()
    cells = [("token", "role", "created", "rotated", "connections", "hosts")]
    for row in rows:
        rotated = f"{seconds(now_s - row.rotated_s)} ago" if row.rotated_s else "-"
        if row.is_overlapping:
            rotated += ", both secrets work"
        number = "?" if row.num_connections is None else str(row.num_connections)
        created = f"{seconds(now_s - row.created_s)} ago"
        cells.append((row.id, str(row.role), created, rotated, number, printable_line(", ".join(row.hosts)) or "-"))
    head, *lines = aligned(cells)
    return [click.style(head, dim=True), *lines]


@tokens.command(
    epilog="\b\nExamples:\n  headrace fleet tokens revoke generator-3f9a1c07\n"
    "  headrace fleet tokens revoke generator-3f9a1c07 runs/demo"
)
@click.argument("names", nargs=-1, metavar="TOKEN... [RUN]")
@run_among("names")
@json_option
def revoke(names: tuple[str, ...], run: Path | None, as_json: bool) -> None:
    """Revoke tokens, and shut out their workers at once."""
    if not names:
        raise click.UsageError("no token given; `headrace fleet tokens list` names them")

    async def end() -> list[str]:
        ended: list[str] = []
        async with attach(run) as at:
            for name in names:
                workers = await at.tokens.revoke(name)
                known = {beat.who.worker for beat in await workers_of(at)}
                for worker in sorted(known & set(workers)):
                    await at.registry.fence(worker)
                    ended.append(worker)
        return ended

    workers = asyncio.run(end())
    lines = [f"revoked: {', '.join(names)}", f"ended workers: {printable_line(', '.join(workers)) or 'none'}"]
    answer(as_json, {"revoked": list(names), "ended_workers": workers}, *lines)


@tokens.command(
    epilog="""\b
Examples:
  headrace fleet tokens rotate generator-3f9a1c07
  headrace fleet tokens rotate generator-3f9a1c07 --overlap 0  # ends the old

Copy the new file over the old one on each host. Workers read it without a restart."""
)
@click.argument("name", nargs=-1, metavar="TOKEN [RUN]")
@run_among("name")
@click.option("--out", type=PATH, help="The token's file. Default: RUN/tokens/TOKEN.token")
@click.option(
    "--overlap",
    "overlap_s",
    type=click.FloatRange(0.0, 30 * 86400.0),
    default=_OVERLAP_S,
    show_default=True,
    metavar="SECONDS",
    help="How long the old secret still works.",
)
@json_option
def rotate(name: tuple[str, ...], run: Path | None, out: Path | None, overlap_s: float, as_json: bool) -> None:
    """Replace a token's secret while its workers keep running."""
    if len(name) != 1:
        raise click.UsageError("expected one token; `headrace fleet tokens list` names them")

    async def change() -> tuple[Token, Path]:
        async with attach(run) as at:
            path = _place(at, name[0], out)
            token = await at.tokens.rotate(name[0], overlap_s=overlap_s, ca=_authority(at))
            return token, _write(at, token, path)

    token, path = asyncio.run(change())
    old = f"the old secret works for {overlap_s:g} s more" if overlap_s else "the old secret no longer works"
    answer(
        as_json,
        _shown(token, path) | {"overlap_s": overlap_s},
        f"{token.id} has a new secret: {path}; {old}",
        _REMEDY.format(path=path),
    )


def _shown(token: Token, path: Path) -> dict[str, object]:
    return {"token": token.id, "role": token.role, "run": token.run, "file": path}


def _place(at: Attached, name: str, out: Path | None) -> Path:
    """Return the file's path. Raises ConfigError when its folder is missing or not writable."""
    from protocol.private import ensure_private_folder

    if out is None:
        out = at.run_dir / "tokens" / f"{name}.token"
        ensure_private_folder(out.parent)
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: {out.parent} is not a folder; expected a file in an existing folder")
    return out


def _write(at: Attached, token: Token, out: Path | None) -> Path:
    from pipeline.ledger.token import write_token

    path = _place(at, token.id, out)
    write_token(path, token)
    return path


def _authority(at: Attached) -> str:
    """Return the PEM text of the certificate authority that the run's own ledger URL names, or ""
    if none."""
    from pipeline.ledger.address import read_ledger_url
    from pipeline.ledger.token import read_authority

    return read_authority(read_ledger_url(at.run_dir))
