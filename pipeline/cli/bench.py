"""``headrace bench``: comparisons on this machine, each a module of ``ops.bench``.

*Consumes* a name and the comparison's own arguments. *Waits for* the module's process. Benchmarks
come with the source tree, which has their configurations; an installed package has none."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import click

from protocol.errors import ConfigError

NAMES = {
    "ablation": "The papers' tables in small: trained variants, compared.",
    "codec": "A chunk to bytes and back, against plain lists.",
    "demos": "The demos against their bar, seed by seed.",
    "engine": "The local engine against transformers and vLLM.",
    "fleet_memory": "Resident memory of the demo's fleet.",
    "hosts": "The demo over three hosts that share nothing, against one.",
    "hot_update": "A setting changed in a run, against drain and resume.",
    "join": "A joining worker, from its command to its first work.",
    "judge": "Generators with a judge of two seconds, against none.",
    "learner": "The packed step against a padded one, and TRL's.",
    "ledger": "Chunks through ledger and wire, against ZeroMQ, Redis, Ray.",
    "overhead": "Processor time of the control plane, 2 to 60 generators.",
    "overlap": "Barrier, one step off, asynchronous: the same draws.",
    "one_process": "A demo's learning in one synchronous process.",
    "oversampling": "Gain and cost of over-sampling, in virtual time.",
    "recover": "Repairs of killed and frozen workers, on real processes.",
    "snapshots": "A snapshot after every update: the rate that it costs.",
    "startup": "Start of the command line, against Python's own.",
    "trace": "Causes of stalls, on emulated fleets with faults.",
    "views": "Looks at a full ledger, and the price of their counts.",
    "watch": "The faulty worker in synthetic fleets of 8 to 10,000.",
    "watching": "A run that top and a page watch, against the same run alone.",
    "weights": "A version from publish to served; size of what changed.",
    "workers": "Idle workers and chunks at one ledger server: its limit.",
}

_EPILOG = (
    "\b\nComparisons:\n"
    + "\n".join(
        textwrap.fill(summary, 78, initial_indent=f"  {name:<14}", subsequent_indent=" " * 16)
        for name, summary in NAMES.items()
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
@click.argument("name", required=False, type=click.Choice(list(NAMES)), metavar="NAME")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(ctx: click.Context, name: str | None, arguments: tuple[str, ...]) -> int:
    """Measure and compare on this machine."""
    if name is None:
        click.echo(ctx.get_help())
        return 0
    module = f"ops.bench.{name}"
    # As with python -m, modules are found in the present folder.
    sys.path.insert(0, "")
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise ConfigError("no benchmarks here; call headrace bench in the top folder of the source tree")
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
