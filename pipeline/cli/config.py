"""``headrace config check`` and ``headrace config show``."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.common import echo_json, json_option
from protocol.printable import printable

_FILES = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
_SET = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Applied last; may be repeated."
)


@click.group(no_args_is_help=True)
def config() -> None:
    """Check or show the configuration that files and --set make."""


@config.command(
    epilog="\b\nExample:\n  headrace config check configs/demo.toml configs/fleets/demo.toml --set staleness.eta=4"
)
@_FILES
@_SET
@json_option
def check(files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a configuration with everything that it names: model, data, verifiers. Nothing is started."""
    from pipeline.config.load import load_config
    from pipeline.preflight import preflight
    from pipeline.run_dir import check_no_run
    from pipeline.runtime.log import log_to_stderr

    log_to_stderr()
    loaded = load_config(files, overrides)
    check_no_run(loaded)
    findings = preflight(loaded).findings
    if as_json:
        echo_json({"ok": True, "findings": findings})
        return
    for line in findings:
        click.echo(printable(line))
    click.echo("ok")


@config.command(epilog="\b\nExample:\n  headrace config show configs/demo.toml --set run.seed=3")
@_FILES
@_SET
@json_option
def show(files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every setting, defaults included, as TOML."""
    from pipeline.config.load import load_config, public_settings, to_toml

    loaded = load_config(files, overrides)
    if as_json:
        echo_json(public_settings(loaded))
    else:
        click.echo(to_toml(loaded), nl=False)
