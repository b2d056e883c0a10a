"""The ``headrace`` command.

Each command is a module that is imported only when it is called, and none imports torch:
``headrace --help`` starts in a fraction of a second. Errors are one sentence on standard error and
a documented exit code (``pipeline.process.exit_codes``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

import click

from pipeline.files import keep_private
from protocol.errors import HeadraceError
from protocol.printable import printable

_COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("pipeline.cli.up", "Start a run and stay with it until it ends."),
    "pretrain-value": ("pipeline.cli.pretrain", "Train a value model on the start policy, and export it."),
    "down": ("pipeline.cli.control", "Ask a run to drain and end."),
    "scale": ("pipeline.cli.control", "Change how many workers of a role a run has, while it runs."),
    "status": ("pipeline.cli.inspect", "Show workers, progress and what each waits for."),
    "why": ("pipeline.cli.why", "Name what the run waits for, from the learner to the root, and what to do."),
    "queues": ("pipeline.cli.inspect", "Show every link and ledger queue: depth, limit, oldest age, consumer."),
    "audit": ("pipeline.cli.inspect", "Check the conservation law: admitted = trained + dropped + in flight."),
    "peek": ("pipeline.cli.peek", "Show what is in the ledger, or one stored chunk with its scores."),
    "requeue": ("pipeline.cli.requeue", "Put work back: open leases for others, make unscored chunks due."),
    "dead-letters": ("pipeline.cli.requeue", "List, show and retry work that a scorer failed on for good."),
    "replay": ("pipeline.cli.replay", "Make a run's updates again from its log, and compare the weights bit by bit."),
    "score": ("pipeline.cli.score.command", "Score a file of responses offline, to check a verifier before training."),
    "samples": ("pipeline.cli.samples", "Show prompts with responses, rewards and verdicts, while a run goes on."),
    "report": ("pipeline.cli.inspect", "Write the page of a run again, from its history and its ledger."),
    "config": ("pipeline.cli.config", "Check or show the configuration that files and --set make."),
    "bench": ("pipeline.cli.bench", "Compare things in one run, on this machine."),
}

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
    """A group that knows its commands' names and summaries, and imports a command when it is
    called.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of a run's life."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in _COMMANDS:
            import difflib

            close = difflib.get_close_matches(cmd_name, _COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_COMMANDS)}."
            raise click.UsageError(f"no command {cmd_name!r}: {hint}")
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        return getattr(module, cmd_name.replace("-", "_"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands from the table, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.command(cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="headrace")
def headrace() -> None:
    """Post-train reasoning language models with reinforcement learning, asynchronously."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with a documented code."""
    keep_private()
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
