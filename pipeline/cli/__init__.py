"""The ``headrace`` command.

A command's module is imported only when the command is called, and none imports torch: the help
appears in a fraction of a second. An error is one sentence on standard error, with an exit code of
``pipeline.process.exit_codes``."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from collections.abc import Mapping
from keyword import iskeyword

import click

from pipeline.files import keep_private
from protocol.errors import HeadraceError
from protocol.printable import printable

_COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("pipeline.cli.up", "Start a run and stay with it until it ends."),
    "pretrain-value": ("pipeline.cli.pretrain", "Train a value model before a run, and export it."),
    "join": ("pipeline.cli.join", "Give a run of another host workers of this one."),
    "tokens": ("pipeline.cli.tokens", "Let other hosts join a run, and end that again."),
    "probe": ("pipeline.cli.probe", "Check a supervisor, for probes of a container."),
    "place": ("pipeline.cli.place", "Start and list joins of this host, for a launcher."),
    "down": ("pipeline.cli.control", "Drain a run and end it."),
    "scale": ("pipeline.cli.control", "Change how many workers a role has."),
    "drain": ("pipeline.cli.control", "Have one worker finish its work and leave."),
    "evict": ("pipeline.cli.evict", "Take a worker or a joined host out at once."),
    "readmit": ("pipeline.cli.evict", "Let an evicted worker or host work again."),
    "update": ("pipeline.cli.update", "Change settings while the run goes on."),
    "pause": ("pipeline.cli.control", "Admit no new groups; work in flight is finished."),
    "resume": ("pipeline.cli.control", "Admit new groups again, after pause."),
    "status": ("pipeline.cli.inspect", "Show workers, progress and what each waits for."),
    "why": ("pipeline.cli.why", "Explain what the run waits for, and what to do."),
    "incidents": ("pipeline.cli.incidents", "Show what was found wrong, since when, and why."),
    "trace": ("pipeline.cli.trace", "Show a trajectory's life, stalls, or a run in time."),
    "watch": ("pipeline.cli.watch", "Name the odd workers of a run, or of a table."),
    "top": ("pipeline.cli.top", "Show a run on a full screen, with keys that change it."),
    "dashboard": ("pipeline.cli.dashboard", "Show runs in a browser, live."),
    "logs": ("pipeline.cli.logs", "Show what workers have logged, on every host."),
    "stacks": ("pipeline.cli.stacks", "Show where workers stand, and which are unlike the rest."),
    "queues": ("pipeline.cli.inspect", "Show every queue: depth, limit, age, consumer."),
    "groups": ("pipeline.cli.looks", "Show open groups, and what each member waits for."),
    "versions": ("pipeline.cli.looks", "Show how stale the work is, and was."),
    "drops": ("pipeline.cli.looks", "Show what was dropped and why, beside what was trained."),
    "trajectory": ("pipeline.cli.trajectory", "Show the whole life of one trajectory."),
    "audit": ("pipeline.cli.inspect", "Check: admitted = trained + dropped + in flight."),
    "peek": ("pipeline.cli.peek", "List what the ledger holds, or show one chunk."),
    "requeue": ("pipeline.cli.requeue", "Free leased trajectories, make unscored chunks due."),
    "dead-letters": ("pipeline.cli.requeue", "List, show and retry work that a scorer gave up."),
    "replay": ("pipeline.cli.replay", "Repeat a run's updates and compare the weights."),
    "score": ("pipeline.cli.score.command", "Score a file of responses, to check a verifier."),
    "samples": ("pipeline.cli.samples", "Show prompts, responses, rewards and verdicts."),
    "compare": ("pipeline.cli.compare", "Compare runs: settings, accuracy, throughput."),
    "runs": ("pipeline.cli.runs", "List the runs of a folder: state, accuracy, when."),
    "report": ("pipeline.cli.inspect", "Write a run's report again."),
    "export": ("pipeline.cli.export", "Write a run's model with a card, or its records."),
    "check-model": ("pipeline.cli.check_model", "Compare the engines on a model."),
    "init": ("pipeline.cli.init", "Write a run file and a fleet file for your data."),
    "selfcheck": ("pipeline.cli.selfcheck", "Check that devices and workers compute the same."),
    "try": ("pipeline.cli.trial", "Show what the start model answers, and its verdicts."),
    "doctor": ("pipeline.cli.doctor", "Check this machine, and a configuration on it."),
    "config": ("pipeline.cli.config", "Check, show or explain the configuration."),
    "bench": ("pipeline.cli.bench", "Measure and compare on this machine."),
}

_ALLOCATIONS = 100_000
"""Objects between two garbage collections of a command. Its imports make about as many, and no
garbage: at Python's 700 a third of a light command's time went into looking through them."""

_EPILOG = """\b
Examples:
  headrace up configs/demo.toml --fleet configs/fleets/demo.toml
  headrace status                 # the newest run under ./runs
  headrace why                    # what it waits for, and what to do
  headrace queues runs/demo --json
  headrace scale generator=4
  headrace audit
"""


class LazyGroup(click.Group):
    """A group with a table of its commands, which imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of a run's life."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in _COMMANDS:
            import difflib

            close = difflib.get_close_matches(cmd_name, _COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected {', '.join(_COMMANDS)}"
            raise click.UsageError(f"no command {cmd_name!r}: {hint}")
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        name = cmd_name.replace("-", "_")
        return getattr(module, f"{name}_" if iskeyword(name) else name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands from the table, without an import."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.command(cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headrace")
def headrace() -> None:
    """Post-train reasoning language models with reinforcement learning, asynchronously."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with a documented code."""
    keep_private()
    gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])
    # the interpreter's end looks through all modules twice more, but for frozen ones
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
