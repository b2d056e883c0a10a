"""Tokens of launched roles: made at the start of a run, kept in ``RUN/tokens``."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.tokens import TokenAdmin
from pipeline.ledger.token import read_authority, read_token, write_token
from pipeline.supervisor.launchers.build import TOKENS
from protocol.errors import ConfigError
from protocol.ids import Role


async def keep_tokens(config: RunConfig, run_dir: Path) -> None:
    """Make a token for each launched role that has none which is still valid. Raises ConfigError:
    the ledger's server permits no ACL commands. Raises LedgerUnavailable."""
    url = read_ledger_url(run_dir)
    folder = run_dir / TOKENS
    folder.mkdir(mode=0o700, exist_ok=True)
    admin = TokenAdmin(connect(url), config.run.name)
    try:
        valid = {row.id for row in await admin.rows()}
        for name in sorted(config.launch.launched):
            path = folder / f"{name}.token"
            if _token_id(path) not in valid:
                write_token(path, await admin.create(Role(name), ca=read_authority(url)))
    finally:
        await admin.aclose()


def _token_id(path: Path) -> str | None:
    try:
        return read_token(path).id
    except ConfigError:
        return None
