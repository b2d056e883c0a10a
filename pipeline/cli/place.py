"""``headrace fleet place``: start, stop and list joins of this host, for a launcher on another one.

It reads one request from standard input and prints one answer. People have no use for it."""

from __future__ import annotations

import sys

import click

from protocol.errors import ConfigError

_MAX_BYTES = 1 << 20


@click.command()
def place() -> int:
    """Serve one request of a launcher, read from standard input."""
    return serve()


def serve(*program: str) -> int:
    """Serve a request. ``program``: command of Headrace; absent: this installation's."""
    import msgspec

    from pipeline.supervisor.launchers.host_jobs import HostRequest, answer

    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(_MAX_BYTES), type=HostRequest)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"no launcher's request on standard input: {error}; this command is only used by launchers"
        ) from None
    click.echo(msgspec.json.encode(answer(request, program)).decode())
    return 0
