"""``headrace bench``: comparisons measured on this machine, each a module of ``ops.bench``.

*Consumes* a name and the comparison's own arguments. *Produces* what that module prints and writes.
*Waits for* it. Benchmarks come with the source tree, which also holds the configurations that they
vary; an installed package alone has none.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import click

from protocol.errors import ConfigError

_NAMES = {
    "ablation": "The papers' tables in small: variants trained for real and compared.",
    "codec": "A chunk to bytes and back, against the same chunk with plain lists.",
    "demos": "Whether the demos reach their bar, seed by seed: the fleets of make demo.",
    "engine": "The local engine against generate and continuous batching of transformers, and vLLM.",
    "fleet_memory": "Resident memory of the demo's fleet.",
    "learner": "The learner's packed step against a padded one, and TRL's trainer.",
    "ledger": "Chunks through ledger and wire, against raw ZeroMQ, SET and GET, a stream of pickles, Ray's queue.",
    "overhead": "What the control plane costs in processor time, by part, from 2 to 60 emulated generators.",
    "overlap": "Barrier, one step off, asynchronous: the same draws on the real control plane, emulated engines.",
    "one_process": "A demo's learning in one process, synchronous: what a setting does to it, in a minute or two.",
    "oversampling": "What over-sampling gives and costs: the real ledger in virtual time.",
    "startup": "The command line's start, against that of Python.",
    "weights": "A version from publish to served, and the pause; what changed from one to the next.",
}

_EPILOG = (
    "\b\nComparisons:\n"
    + "\n".join(
        textwrap.fill(summary, 78, initial_indent=f"  {name:<14}", subsequent_indent=" " * 16)
        for name, summary in _NAMES.items()
    )
    + ("\n\n\b\nExamples:\n  headrace bench engine --json bench-results/engine.json\n  headrace bench ablation --help")
)


@click.command(
    epilog=_EPILOG,
    context_settings={
        "ignore_unknown_options": True,
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
    },
)
@click.argument("name", required=False, type=click.Choice(list(_NAMES)), metavar="NAME")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(ctx: click.Context, name: str | None, arguments: tuple[str, ...]) -> int:
    """Compare things in one run, on this machine."""
    if name is None:
        click.echo(ctx.get_help())
        return 0
    module = f"ops.bench.{name}"
    # as python -m does: the source tree is the present folder
    sys.path.insert(0, "")
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise ConfigError("benchmarks come with the source tree; call headrace bench in its top folder")
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
