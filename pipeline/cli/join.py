"""``headrace fleet join``: runs workers on this host for a run on another host. ``fleet place``
serves launchers.

*Consumes* the ledger's address and a token. *Produces* workers, until the run ends. *Waits for* the
run and its files. *Unblocked by* the run's host, or by Ctrl-C.

``fleet place`` starts, stops and lists this host's joins for a launcher: one request on standard
input, one answer on standard output."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import PATH, echo_json, json_option
from protocol.errors import ConfigError
from protocol.ids import ELASTIC_ROLES, Role, is_worker_name
from protocol.printable import printable
from protocol.private import user_state

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.supervisor.joining.joined_folder import JoinedFolder
    from pipeline.supervisor.joining.joined_supervisor import JoinOutcome

_ROLES = tuple(map(str, ELASTIC_ROLES))
_EPILOG = """\b
Examples:
  headrace fleet join rediss://host:6379/0 --token generator.token --count 4
  headrace fleet join rediss://host:6379/0 --token generator.token --stay 600
  headrace fleet join --run demo --role reward   # address in REDIS_URL

\b
Exit codes:
  0    the run has ended, or Ctrl-C: the workers drained
  2    token, clock, version, role or a file is wrong; the message says which
  3    the ledger's server does not answer
  9    this host's disk or memory failed
  130  stopped twice, or before a worker was started

Workers that fail more often than supervisor.max_restarts allows end the command with the worker's
exit code. The run and other hosts continue.
"""


@click.command(epilog=_EPILOG)
@click.argument("url", required=False, metavar="[LEDGER_URL]")
@click.option("--token", type=PATH, help="File that `headrace fleet tokens create` wrote; it names run and role.")
@click.option("--allow-plaintext", is_flag=True, help="Allow an unencrypted redis:// connection to another host.")
@click.option("--run", "run_name", metavar="NAME", help="The run's name, if there is no token.")
@click.option("--role", type=click.Choice(_ROLES), help="Role of the workers. Default: the token's role.")
@click.option("--count", type=click.IntRange(1, 1024), default=1, show_default=True, help="Number of workers.")
@click.option("--name", default="", help="Name of the single worker, unique in the run; used by launchers.")
@click.option(
    "--dir", "base", type=PATH, help="Where to create the joined folder. Default: ~/.local/state/headrace/joined."
)
@click.option(
    "--wait",
    "wait_s",
    type=float,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait for the run to start.",
)
@click.option(
    "--stay",
    "stay_s",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait for a stopped or failed run to be resumed, then join again.",
)
@json_option
def join(
    url: str | None,
    token: Path | None,
    allow_plaintext: bool,
    run_name: str | None,
    role: str | None,
    count: int,
    name: str,
    base: Path | None,
    wait_s: float,
    stay_s: float,
    as_json: bool,
) -> int:
    """Run workers on this host for a run on another host, until it ends."""
    from pipeline.ledger.url import hide_password, refuse_plaintext
    from pipeline.runtime.log import log_to_stderr, open_log
    from pipeline.supervisor.joining.join import JoinRequest, join_and_stay
    from pipeline.supervisor.joining.join import join as join_run
    from pipeline.supervisor.joining.joined_folder import claimed_folder

    log_to_stderr()
    if url is not None and hide_password(url) != url:
        raise ConfigError(
            "the ledger URL has a password, which every user of this host can see in the process list; leave it out "
            "and give --token FILE, or put the whole URL into REDIS_URL"
        )
    url = url or os.environ.get("REDIS_URL")
    if url is None:
        raise click.UsageError("no ledger: give its URL, for example rediss://HOST:6379/0, or set REDIS_URL")
    if not allow_plaintext:
        refuse_plaintext(url, "give --allow-plaintext")
    run, wanted = _named(token, run_name, role)
    if name and (count > 1 or not is_worker_name(name) or not name.startswith(f"{wanted}-")):
        raise click.UsageError(
            f"--name {name!r:.80} cannot name {count} {wanted} workers; expected --count 1 and a name like {wanted}-2"
        )
    with claimed_folder((base or user_state("joined")).absolute(), run, wanted, name) as folder:
        url = _with_token(url, token, folder)
        request = JoinRequest(url, run, wanted, count, wait_s, token, allow_plaintext)
        who = folder.worker_name(Role.SUPERVISOR, 0)
        log = open_log(folder.path, role=Role.SUPERVISOR, worker=who, run=run)

        def began() -> None:
            click.echo(
                f"joined {run} as {count} {wanted} {'worker' if count == 1 else 'workers'} of {socket.gethostname()}; "
                f"logs: {folder.path / 'logs'}",
                err=True,
            )

        def stays(outcome: JoinOutcome) -> None:
            waits = f"this host waits up to {stay_s:g} s for `headrace up --resume`; Ctrl-C ends it"
            click.echo(f"{printable(outcome.detail)}; {waits}", err=True)

        once = partial(join_run, request, folder, check=partial(check_host, role=wanted), began=began)
        try:
            outcome = asyncio.run(join_and_stay(request, once, stay_s=stay_s, stays=stays))
        finally:
            log.close()
        return _report(folder, outcome, as_json=as_json)


def _named(token: Path | None, run: str | None, role: str | None) -> tuple[str, Role]:
    if token is None:
        if run is None or role is None:
            raise click.UsageError("which run, and as what? Give --token FILE, or --run NAME and --role ROLE")
        return run, Role(role)
    from pipeline.ledger.token import read_token

    read = read_token(token)
    if run not in (None, read.run) or role not in (None, str(read.role)):
        given = " ".join(word for word in (run, role) if word)
        raise ConfigError(
            f"token file {token} is for {read.role} workers of the run {read.run}, but the command asks for "
            f"{given}; leave out --run and --role, or give another token"
        )
    if str(read.role) not in _ROLES:
        raise ConfigError(
            f"token file {token} is for a {read.role}, which the run's host starts; expected {', '.join(_ROLES)}"
        )
    return read.run, read.role


def _with_token(url: str, token: Path | None, folder: JoinedFolder) -> str:
    if token is None:
        return url
    from pipeline.ledger.token import ledger_url, read_token
    from pipeline.supervisor.joining.joined_folder import room

    read = read_token(token)
    with room(folder.path):
        return ledger_url(url, read, folder.path)


def check_host(config: RunConfig, role: Role) -> None:
    """Raise ConfigError when this host lacks what workers of a role import."""
    engine = {Role.GENERATOR: config.generation.engine, Role.REFERENCE: config.reference.backend}.get(role)
    if engine == "vllm":
        from pipeline.preflight.vllm import check_versions

        check_versions()


def _report(folder: JoinedFolder, outcome: JoinOutcome, *, as_json: bool) -> int:
    if as_json:
        failed = outcome.worker or None
        echo_json(
            {"folder": folder.path, "detail": outcome.detail, "exit_code": outcome.exit_code, "failed_worker": failed}
        )
    else:
        click.echo(printable(outcome.detail))
    if outcome.worker:
        click.echo(f"\nlast lines of {outcome.worker}:\n{printable(outcome.last_lines)}", err=True)
        click.echo(f"its log: {folder.path / 'logs' / f'{outcome.worker}.jsonl'}", err=True)
    sys.stdout.flush()
    return outcome.exit_code


_MAX_BYTES = 1 << 20


@click.command()
def place() -> int:
    """Serve one request of a launcher, read from standard input."""
    return serve()


def serve(*program: str) -> int:
    """Serve one request of a launcher. ``program`` is the Headrace command, by default this
    installation's."""
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
