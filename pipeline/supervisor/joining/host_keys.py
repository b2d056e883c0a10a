"""Keeps CURVE keys and join tokens up to date while a host serves or joins a run.

*Consumes* permitted keys and token records from the ledger. *Produces* files in ``keys``, and on
the run's host the ledger server's users. *Waits for* changes, polling once a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.permitted_keys import OF_OWNER
from pipeline.ledger.redis.tokens import AclRefused, TokenAdmin
from pipeline.ledger.token import read_token
from pipeline.ledger.url import split_token_file
from pipeline.runtime.key_mirror import introduce, mirror_keys
from pipeline.runtime.worker_process import leaves
from protocol.errors import LedgerError, LedgerRefused
from protocol.zeromq import CurveKeys

_KEEP_EVERY_S = 1.0
_ANSWER_S = 2.0

_log = structlog.get_logger(__name__)


async def keep_tokens(url: str, run: str) -> None:
    """Keep the ledger server's users equal to the run's tokens until cancelled; a server that was
    restarted or failed over lacks them."""
    client = connect(url, timeout_s=_ANSWER_S, patience_s=_ANSWER_S)
    admin = TokenAdmin(client, run)
    trouble = ""
    try:
        while True:
            try:
                await admin.keep()
                trouble = ""
            except (LedgerError, AclRefused) as error:
                if not trouble:
                    _log.warning("tokens_not_kept", reason=str(error))
                trouble = str(error)
            await asyncio.sleep(_KEEP_EVERY_S)
    finally:
        await admin.aclose()
        await client.aclose()


@asynccontextmanager
async def mirrored_keys(
    url: str, run: str, keys: CurveKeys, *, token_file: Path | None = None, refused: Callable[[str], None]
) -> AsyncIterator[None]:
    """Mirror the run's permitted keys into a joined host's folder while the context is open.

    Args:
        url: The ledger's; its token file, if any, identifies the token.
        run: Name of the run.
        keys: This host's.
        token_file: File that an operator replaces to rotate the token; its copy is updated.
        refused: Called with the reason if the token is revoked, which ends the mirroring."""
    _, copy = split_token_file(url)
    token = OF_OWNER if copy is None else read_token(copy).id
    await introduce(url, run, keys, token)
    files = (token_file, copy) if token_file is not None and copy is not None else None

    async def mirror() -> None:
        try:
            await mirror_keys(url, run, keys, token=token, token_files=files)
        except LedgerRefused as error:
            _log.warning("keys_no_longer_mirrored", reason=str(error))
            refused(str(error))

    try:
        async with asyncio.TaskGroup() as tasks:
            mirroring = tasks.create_task(mirror())
            try:
                yield
            finally:
                mirroring.cancel()
    except BaseExceptionGroup as group:
        raise leaves(group)[0] from None
