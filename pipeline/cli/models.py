"""``headrace dev check-model`` compares the engines on a model; ``headrace dev pretrain-value``
trains a value model that a run can start from.

Pretraining is a run without updates: the start policy samples, the value worker learns, and units
that are ready for the learner are dropped as ``value_warmup``. The output folder, for
``value.path``, holds a Hugging Face token classifier and ``pretraining.json``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import PATH, aligned, answer, echo_json, fleet_option, json_option, plain_option, set_option
from protocol.errors import ConfigError, DataError
from protocol.printable import printable

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

_CHECK_EPILOG = """\b
Examples:
  headrace dev check-model models/mine
  headrace dev check-model hf://Qwen/Qwen2.5-0.5B --json
  headrace dev check-model models/mine --device cuda
"""


@click.command(epilog=_CHECK_EPILOG)
@click.argument("model", metavar="PATH|hf://NAME")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--timeout", "timeout_s", default=1800.0, show_default=True, help="Seconds to wait at most.")
@json_option
def check_model(model: str, device: str, timeout_s: float, as_json: bool) -> int:
    """Compare learner, local engine and critic with plain transformers on a model.

    The table shows the largest log-prob difference, the relative difference of the gradient, and
    the speed on short sequences. Exit code 0 when every engine computes the model correctly, else
    2."""
    import msgspec

    from pipeline.data.hub import pinned_model
    from pipeline.preflight.engine_reports import remarks_of, report_model, rows_of
    from pipeline.process.exit_codes import ExitCode
    from pipeline.process.progress_bar import progress

    folder = pinned_model(Path(model))
    with progress("computing the model with each engine"):
        report = report_model(folder, device, timeout_s=timeout_s)
    if as_json:
        found = msgspec.to_builtins(report)
        rights = [{**part, "right": one.is_right} for part, one in zip(found["parts"], report.parts, strict=True)]
        echo_json({**found, "right": report.is_right, "parts": rights})
    else:
        size = f"{report.num_weights / 1e6:,.2f} million weights"
        click.echo(printable(f"{report.path}: {report.architecture}, {size}, float32 on {report.device}"))
        click.echo()
        for line in [*aligned(rows_of(report)), "", *remarks_of(report)]:
            click.echo(printable(line))
    return ExitCode.OK if report.is_right else ExitCode.CONFIG


FIGURES_NAME = "pretraining.json"

_EPILOG = """\b
Examples:
  headrace dev pretrain-value configs/vapo.toml --out critics/vapo
  headrace up configs/vapo.toml --set value.path=critics/vapo

The run ends after value.pretrain_steps or, if value.min_explained_variance is set, once that is
reached over value.explained_variance_steps steps. Its name is <run.name>-value. Exit codes are
those of `headrace up`.
"""


@click.command("pretrain-value", epilog=_EPILOG)
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="CONFIG...")
@click.option("--out", required=True, type=PATH, help="New folder for the value model.")
@fleet_option
@set_option
@plain_option
@json_option
def pretrain_value(
    files: tuple[Path, ...], out: Path, fleet: Path | None, overrides: tuple[str, ...], plain: bool, as_json: bool
) -> int:
    """Train a value model on the start policy's responses, and export it."""
    from pipeline.cli.up import carry_out, with_compute_types
    from pipeline.config.load import load_config, resolve_paths
    from pipeline.data.hub import pin_models
    from pipeline.data.places import pin_data
    from pipeline.operator.top.run import has_screen
    from pipeline.supervisor.run_folder import prepare_run_dir

    given = [*files, *([fleet] if fleet else [])]
    config = pretraining_config(resolve_paths(load_config(given, overrides, os.environ)))
    config = with_compute_types(pin_models(pin_data(config)))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists; give a new or an empty folder")
    is_live = not (plain or as_json) and has_screen()
    outcome = carry_out(config, lambda: prepare_run_dir(config, resume=False), is_live=is_live)
    if outcome.exit_code != 0:
        click.echo(f"{outcome.status.state}: {printable(outcome.status.detail)}; no value model was exported", err=True)
        return outcome.exit_code
    figures = export_value_model(config.run_dir, out)
    made = (
        f"value model after {figures['num_steps']} steps, explained variance {figures['explained_variance']:.3f}: {out}"
    )
    use = f"use it with --set value.path={out}; the report: {config.run_dir / 'report.html'}"
    answer(as_json, {"out": out, "run": config.run_dir, **figures}, made, use)
    return outcome.exit_code


def pretraining_config(config: RunConfig) -> RunConfig:
    """Return the run that pretrains the value model of ``config``: without updates and evaluation.
    Raises ConfigError if the algorithm has no critic or ``value.pretrain_steps`` is 0."""
    if not config.declaration.has_critic:
        name = config.algorithm.name
        raise ConfigError(f"algorithm.name is {name!r}, which has no critic; expected ppo, vapo or tppo")
    if config.value.pretrain_steps == 0:
        raise ConfigError(
            "value.pretrain_steps is 0, so the value model would not be trained; set the largest number of steps"
        )
    run = config.run.model_copy(update={"num_updates": 0, "name": f"{config.run.name}-value"})
    data = config.data.model_copy(update={"evaluation": ()})
    evaluation = config.evaluation.model_copy(update={"sets": (), "main": None})
    return config.model_copy(update={"run": run, "data": data, "evaluation": evaluation})


def export_value_model(run_dir: Path, out: Path) -> dict[str, Any]:
    """Copy the value model of a run's newest checkpoint to ``out``, and return its figures. The
    folder appears whole or not at all. Raises DataError if the run has no value checkpoint."""
    from pipeline.observability.history import VALUE_HISTORY_NAME, ValueRow, run_history
    from pipeline.training.checkpoints import VALUE_CHECKPOINTS

    checkpoints = sorted((run_dir / VALUE_CHECKPOINTS).glob("[0-9]*.version-*"), key=lambda path: int(path.stem))
    if not checkpoints:
        raise DataError(f"{run_dir} has no value checkpoint; look at {run_dir / 'logs' / 'value.jsonl'}")
    newest = checkpoints[-1]
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    last = state["explained_variances"]
    history = run_history(run_dir / VALUE_HISTORY_NAME).read_strictly()
    rows = [row for row in history if isinstance(row, ValueRow) and row.step <= state["num_steps"]]
    figures: dict[str, Any] = {
        "num_steps": state["num_steps"],
        "value_version": state["value_version"],
        "explained_variance": sum(last) / len(last) if last else 0.0,
        "explained_variances": [row.explained_variance for row in rows],
        "num_trajectories": sum(row.num_trajectories for row in rows),
        "num_tokens": sum(row.num_tokens for row in rows),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(newest / "model", partial)
    (partial / FIGURES_NAME).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    # The target is absent or an empty folder.
    partial.rename(out)
    return figures
