"""The ``headrace`` command.

A command's module is imported only when the command is called, and none imports torch, so help
appears in a fraction of a second. An error is one sentence on standard error, with an exit code of
``pipeline.process.exit_codes``."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from pipeline.files import keep_private
from protocol.errors import HeadraceError
from protocol.printable import printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_Table = Mapping[str, tuple[str, str]]
"""Command name to its module, which has a function of that name, and its line in the help."""

_DAILY: _Table = {
    "init": ("pipeline.cli.init", "Write a run file and a fleet file for your data."),
    "try": ("pipeline.cli.trial", "Show what the start model answers, and its verdicts."),
    "up": ("pipeline.cli.up", "Start a run and stay with it until it ends."),
    "down": ("pipeline.cli.control", "Drain a run and end it."),
    "top": ("pipeline.cli.top", "Show a run full-screen, with keys to change it."),
    "status": ("pipeline.cli.inspect", "Show workers, progress and what each waits for."),
    "why": ("pipeline.cli.why", "Explain what the run waits for, and what to do."),
    "scale": ("pipeline.cli.control", "Change how many workers a role has."),
    "update": ("pipeline.cli.update", "Change settings while the run goes on."),
    "samples": ("pipeline.cli.samples", "Show prompts, responses, rewards and verdicts."),
    "score": ("pipeline.cli.score.command", "Score a file of responses, to check a verifier."),
    "doctor": ("pipeline.cli.doctor", "Check this machine, and a configuration on it."),
    "schedule": ("pipeline.cli.schedule", "Find the best order of a pipeline's work."),
    "plan": ("pipeline.cli.plan", "Say what to start on which devices, and how fast it is."),
    "profile": ("pipeline.cli.profile", "Measure what a run's work cost, for plans."),
    "simulate": ("pipeline.cli.simulate", "Predict speed, staleness and use before a run."),
}
_GROUPS: _Table = {
    "run": ("pipeline.cli", "List, compare, export and repeat runs; pause and resume one."),
    "fleet": ("pipeline.cli", "Let hosts join; watch, drain and evict hosts and workers."),
    "ledger": ("pipeline.cli", "Inspect and audit the ledger; requeue and retry work."),
    "config": ("pipeline.cli.config", "Check, show or explain the configuration."),
    "dev": ("pipeline.cli", "Compare engines on a model; train a value model."),
}
_MEMBERS: Mapping[str, _Table] = {
    "run": {
        "list": ("pipeline.cli.runs", "List the runs in a folder: state, accuracy, start."),
        "report": ("pipeline.cli.inspect", "Write a run's report again."),
        "compare": ("pipeline.cli.runs", "Compare runs: settings, accuracy, throughput."),
        "export": ("pipeline.cli.export", "Write a run's model with a card, or its records."),
        "replay": ("pipeline.cli.runs", "Repeat a run's updates and compare the weights."),
        "logs": ("pipeline.cli.logs", "Show the workers' logs, from every host."),
        "trace": ("pipeline.cli.trace", "Show a trajectory, causes of stalls, or a timeline."),
        "dashboard": ("pipeline.cli.top", "Show runs in a browser, live."),
        "pause": ("pipeline.cli.control", "Stop admitting new groups; finish work in flight."),
        "resume": ("pipeline.cli.control", "Admit new groups again after a pause."),
    },
    "fleet": {
        "join": ("pipeline.cli.join", "Run workers here for a run on another host."),
        "tokens": ("pipeline.cli.tokens", "Create and revoke tokens for joining hosts."),
        "place": ("pipeline.cli.join", "Start and list this host's joins, for a launcher."),
        "probe": ("pipeline.cli.probe", "Check a supervisor, for a container's probes."),
        "drain": ("pipeline.cli.control", "Let one worker finish its work, then stop it."),
        "evict": ("pipeline.cli.control", "Remove a worker or a joined host at once."),
        "readmit": ("pipeline.cli.control", "Let an evicted worker or host work again."),
        "stacks": ("pipeline.cli.logs", "Show workers' stacks, and which are different."),
        "incidents": ("pipeline.cli.incidents", "List what went wrong, since when, and why."),
        "watch": ("pipeline.cli.watch", "Find workers that behave unlike the others."),
        "selfcheck": ("pipeline.cli.doctor", "Check that devices and workers compute the same."),
    },
    "ledger": {
        "queues": ("pipeline.cli.inspect", "Show every queue: depth, limit, age, consumer."),
        "groups": ("pipeline.cli.ledger_views", "Show open groups, and what each member waits for."),
        "versions": ("pipeline.cli.ledger_views", "Show the staleness of present and past work."),
        "drops": ("pipeline.cli.ledger_views", "Show what was dropped and why, next to what was trained."),
        "trajectory": ("pipeline.cli.samples", "Show the whole life of one trajectory."),
        "audit": ("pipeline.cli.inspect", "Check: admitted = trained + dropped + in flight."),
        "peek": ("pipeline.cli.peek", "List what the ledger holds, or show one chunk."),
        "requeue": ("pipeline.cli.requeue", "Release leases; send chunks to scorers again."),
        "dead-letters": ("pipeline.cli.requeue", "List, show and retry work that scorers gave up on."),
    },
    "dev": {
        "check-model": ("pipeline.cli.models", "Compare the engines on a model."),
        "pretrain-value": ("pipeline.cli.models", "Train a value model before a run, and export it."),
    },
}

RENAMED: Mapping[str, str] = {
    "runs" if name == "list" else name: f"{group} {name}" for group, table in _MEMBERS.items() for name in table
}
"""Today's words for commands that were once at the top level, by their old names. These still work,
for scripts and for launchers of other hosts, but no help shows them."""

_ALLOCATIONS = 100_000
"""Allocations between two garbage collections. A command's imports allocate about this many objects
and no garbage; at Python's default of 700, a light command spent a third of its time collecting."""

_EPILOG = """\b
Examples:
  headrace up configs/demo.toml --fleet configs/fleets/demo.toml
  headrace status                 # the newest run under ./runs
  headrace why                    # what it waits for, and what to do
  headrace scale generator=4
  headrace run list               # the runs under ./runs
  headrace ledger queues runs/demo --json
  headrace ledger audit
"""


class LazyGroup(click.Group):
    """A command group that imports a command's module only when the command is called."""

    def __init__(self, *args: Any, sections: Mapping[str, _Table], renamed: Mapping[str, str] | None = None, **kw: Any):
        """``sections``: command tables by their titles in the help. ``renamed``: today's words by
        old name."""
        super().__init__(*args, **kw)
        self._sections = sections
        self._table = {name: entry for table in sections.values() for name, entry in table.items()}
        self._renamed = renamed or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module = importlib.import_module(self._table[cmd_name][0])
        name = cmd_name.replace("-", "_")
        # list_ and try_, since Python has taken list and try
        return getattr(module, f"{name}_", None) or getattr(module, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command, also by its old name, which prints a hint on standard error. Raises
        click.UsageError for an unknown one."""
        name, *others = args
        if name in self._renamed:
            if not ctx.resilient_parsing:
                click.echo(f"`headrace {name}` is now `headrace {self._renamed[name]}`", err=True)
            name, *inner = self._renamed[name].split()
            args = [name, *inner, *others]
        elif name == "bench" and self._renamed:
            raise click.UsageError(
                "headrace bench was removed; in a clone of the repository, use `python -m ops.bench`", ctx
            )
        elif name not in self._table and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"no command {name!r}: {self._hint(name)}", ctx)
        return super().resolve_command(ctx, args)

    def _hint(self, name: str) -> str:
        import difflib

        known = {**RENAMED, **{words.split()[1]: words for words in RENAMED.values()}}
        known |= {word: word for word in (*_DAILY, *_GROUPS)}
        close = difflib.get_close_matches(name, known, n=1)
        return f"did you mean `headrace {known[close[0]]}`?" if close else f"expected {', '.join(self._table)}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, table in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in table.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=summary)
            for name, (_, summary) in self._table.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


@click.command(
    cls=LazyGroup,
    sections={"Commands": _DAILY, "Groups, each with its own --help": _GROUPS},
    renamed=RENAMED,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="headrace")
def headrace() -> None:
    """Post-train reasoning language models with reinforcement learning, asynchronously."""


@click.command(
    cls=LazyGroup,
    sections={"Commands": _MEMBERS["run"]},
    epilog="""\b
Examples:
  headrace run list               # those under ./runs, the newest first
  headrace run compare runs/a runs/b
  headrace run export runs/demo --out models/demo
  headrace run logs learner reward-0""",
)
def run() -> None:
    """List, compare, export and repeat runs; pause and resume one."""


@click.command(
    cls=LazyGroup,
    sections={"Commands": _MEMBERS["fleet"]},
    epilog="""\b
Examples:
  headrace fleet tokens create --role generator
  headrace fleet drain generator-1 --replace
  headrace fleet incidents        # what went wrong, since when, and why""",
)
def fleet() -> None:
    """Manage a run's hosts and workers: join, watch, drain and evict them."""


@click.command(
    cls=LazyGroup,
    sections={"Commands": _MEMBERS["ledger"]},
    epilog="""\b
Examples:
  headrace ledger queues --watch
  headrace ledger audit           # is every trajectory accounted for?
  headrace ledger dead-letters list""",
)
def ledger() -> None:
    """Inspect a run's ledger: what it holds, how stale it is, what was dropped, who holds work."""


@click.command(
    cls=LazyGroup,
    sections={"Commands": _MEMBERS["dev"]},
    epilog="""\b
Example:
  headrace dev check-model models/mine""",
)
def dev() -> None:
    """Prepare a model: compare the engines on it, or train a value model for it."""


def main(arguments: list[str] | None = None) -> None:
    keep_private()
    gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])
    # at exit the interpreter collects twice more, but skips frozen objects
    atexit.register(gc.freeze)
    try:
        code = headrace.main(arguments, standalone_mode=False)
    except click.exceptions.Exit as ending:
        sys.exit(ending.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except HeadraceError as error:
        from pipeline.process.exit_codes import exit_code_of

        click.echo(f"headrace: {printable(str(error))}", err=True)
        sys.exit(exit_code_of(error))
    sys.exit(code if isinstance(code, int) else 0)
