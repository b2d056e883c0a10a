"""``headrace config check``, ``config show`` and ``config explain``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pipeline.cli.common import PATH, answer, echo_json, json_option, set_option
from protocol.errors import ConfigError
from protocol.printable import printable

_FILES = click.argument("files", nargs=-1, required=True, type=PATH)


@click.group(no_args_is_help=True)
def config() -> None:
    """Check, show or explain a configuration: files, then the environment
    (HEADRACE__LEARNER__LEARNING_RATE=1e-5), then --set."""


@config.command(epilog="\b\nExample:\n  headrace config check configs/demo.toml --set staleness.eta=4")
@_FILES
@set_option
@json_option
def check(files: tuple[Path, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Check settings, model, data and verifiers. Nothing is started."""
    from pipeline.config.load import load_config
    from pipeline.data.hub import pin_models
    from pipeline.preflight.checks import preflight
    from pipeline.runtime.log import log_to_stderr
    from pipeline.supervisor.run_folder import check_no_run

    log_to_stderr()
    loaded = load_config(files, overrides, os.environ)
    check_no_run(loaded)
    findings = preflight(pin_models(loaded)).findings
    answer(as_json, {"ok": True, "findings": findings}, *map(printable, findings), "ok")


@config.command(
    epilog="\b\nExamples:\n  headrace config show configs/demo.toml --set run.seed=3\n"
    "  headrace config show configs/demo.toml --brief"
)
@_FILES
@set_option
@click.option("--brief", is_flag=True, help="Print only the values, without default, unit and meaning.")
@json_option
def show(files: tuple[Path, ...], overrides: tuple[str, ...], brief: bool, as_json: bool) -> None:
    """Print every setting as TOML: default, unit, meaning, source."""
    from pipeline.config.describe import explained
    from pipeline.config.load import load_sourced, settings_to_toml
    from pipeline.config.public import public_settings

    loaded = load_sourced(files, overrides, os.environ)
    if as_json:
        echo_json(public_settings(loaded.config))
    elif brief:
        click.echo(settings_to_toml(public_settings(loaded.config)), nl=False)
    else:
        click.echo(explained(loaded.config, loaded.sources), nl=False)


@config.command(
    epilog="\b\nExamples:\n  headrace config explain learner.learning_rate\n  headrace config explain staleness   # a section"
)
@click.argument("key")
@json_option
def explain(key: str, as_json: bool) -> None:
    """Explain a setting or a section: meaning, unit, default and limits."""
    import functools
    import textwrap

    from pipeline.config.describe import in_toml, sections, settings
    from pipeline.config.load import suggest

    filled = functools.partial(textwrap.fill, width=79, break_on_hyphens=False)
    found = [setting for setting in settings() if key in (setting.key, setting.section)]
    if not found:
        below = [name for name, _ in sections() if name.startswith(f"{key}.")]
        more = f"; expected a key, or a section such as {', '.join(below)}" if below else suggest(key)
        raise ConfigError(f"{key} is not a setting{more}")
    if as_json:
        names = {"default_by_algorithm": "presets"}
        keys = ("key", "kind", "limits", "unit", "default", "default_by_algorithm", "description")
        echo_json([{key: getattr(one, names.get(key, key)) for key in keys} for one in found])
        return
    for number, one in enumerate(found):
        rows = {"is": f"{one.kind}, {one.limits}" if one.limits else one.kind, "unit": one.unit}
        rows |= {
            "default": in_toml(one.default),
            "with": ", ".join(f"{name}: {in_toml(value)}" for name, value in one.presets.items()),
        }
        click.echo(("\n" if number else "") + click.style(one.key, bold=True))
        click.echo(filled(one.description, initial_indent="  ", subsequent_indent="  "))
        for name, words in rows.items():
            if words:
                click.echo(filled(words, initial_indent=f"  {name + ':':<9}", subsequent_indent=11 * " "))
