"""``headrace run export``: a checkpoint's model as a Hugging Face folder with a model card, or the
run's records as tables.

The run may still be going on, or belong to another host: none of its processes is needed. The model
card's figures come from the history up to the exported version. Of paths it shows only the last
part."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from pipeline.cli.common import PATH, answer, json_option, run_argument
from pipeline.config.describe import in_toml, settings
from pipeline.config.public import public_settings
from pipeline.config.schema import RunConfig
from pipeline.config.unread import given_keys
from pipeline.data.hub import hub_name
from pipeline.observability.history import EvaluationRow, Row, UpdateRow
from pipeline.operator.attached import find_run
from pipeline.preflight.packages import installed
from protocol.errors import ConfigError, DataError, HeadraceError

_MOST_ROWS = 20
"""Most updates that the curve shows, including the first and the last."""
_LIBRARIES = ("headrace", "torch", "transformers")


def model_card(config: RunConfig, rows: Iterable[Row], version: int) -> str:
    """Return the Markdown card of policy ``version`` of a run with this history."""
    until = [row for row in rows if not isinstance(row, EvaluationRow | UpdateRow) or row.policy_version <= version]
    updates = [row for row in until if isinstance(row, UpdateRow)]
    evaluations = [row for row in until if isinstance(row, EvaluationRow)]
    algorithm = config.algorithm
    hub = hub_name(config.model.path)
    name = hub or config.model.path.name
    trajectories = sum(row.num_trajectories for row in updates)
    tokens = sum(row.num_trained_tokens for row in updates)
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([f"base_model: {hub.partition('@')[0]}"] if hub else []),
        f"tags: [headrace, reinforcement-learning, {algorithm.name}]",
        "---",
        "",
        f"# {config.run.name}, version {version}",
        "",
        f"Trained from {_code(name)} with Headrace, {_how(config)}.",
        "",
        "## Data",
        "",
        *_training(config),
        f"* evaluation: {_files(config.data.evaluation)}",
        *(f"  * {one.name}: {_files(one.files)}" for one in config.evaluation.sets),
        f"* verifier: {_code(config.data.verifier)}, for lines that name none",
        f"* trained on {trajectories:,} responses, {tokens:,} tokens with loss",
        "",
        "## Algorithm",
        "",
        f"* rule: {_code(algorithm.name)}",
        f"* update: {algorithm.groups_per_update} prompts of {algorithm.group_size} responses",
        f"* optimiser steps of an update: {algorithm.num_minibatches}",
        f"* oldest responses: {config.staleness.eta} versions",
        "",
        "## Versions",
        "",
        *_table(("what", "version"), [("policy", str(version)), ("updates", str(len(updates))), *_installed()]),
        "",
        "## Curve",
        "",
    ]
    lines += _curve(updates, evaluations)
    lines += ["", "## Settings", "", "Those that the run was given; all others have their defaults.", "", "```toml"]
    return "\n".join([*lines, *_settings(config), "```", ""])


def _curve(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRow]) -> list[str]:
    lines = list[str]()
    if evaluations:
        held_out = [
            (str(row.policy_version), row.set_name, f"{100 * row.accuracy:.1f} %", f"{row.num_responses:,}")
            for row in evaluations
        ]
        lines += [*_table(("version", "set", "held-out accuracy", "responses"), held_out), ""]
    if not updates:
        return [*lines, "No update was made."]
    last = len(updates) - 1
    places = sorted({round(place * last / (_MOST_ROWS - 1)) for place in range(_MOST_ROWS)})
    shown = [updates[place] for place in places]
    rows = [
        (str(row.update), f"{row.reward:+.3f}", f"{100 * row.accuracy:.1f} %", f"{row.response_length:.0f}")
        for row in shown
    ]
    return [*lines, *_table(("update", "reward", "accuracy in the batch", "tokens a response"), rows)]


def _installed() -> list[tuple[str, str]]:
    return [(name, installed(name) or "not installed") for name in _LIBRARIES]


def _settings(config: RunConfig) -> list[str]:
    """Return the given settings as TOML. A path counts as given if its last part is not the
    default's, since the run's file has only absolute paths."""
    values = public_settings(config)
    defaults = {setting.key: setting.default for setting in settings()}
    lines = list[str]()
    of = ""
    for key in given_keys(config):
        section, _, name = key.rpartition(".")
        held: Any = values
        for part in key.split("."):
            held = held[part]
        shown = _shortened(held)
        default = defaults[key]
        if isinstance(held, str) and held != shown and isinstance(default, str):
            default = Path(default).name
        if shown == default:
            continue
        if section != of:
            lines += [*([""] if lines else []), f"[{section}]"]
            of = section
        lines.append(f"{name} = {in_toml(shown)}")
    return lines


def _shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items() if item is not None}
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _how(config: RunConfig) -> str:
    return "on recorded responses" if config.data.responses else "by reinforcement learning"


def _training(config: RunConfig) -> list[str]:
    data = config.data
    if data.responses:
        return [f"* training: recorded responses of {_files(data.responses)}"]
    sets = [f"  * {one.name}, weight {one.weight:g}: {_files(one.train)}" for one in data.sets]
    return [f"* training: {_files(data.train)}" if data.train else "* training: several sets", *sets]


def _files(paths: Sequence[Path | str]) -> str:
    """Format files: names on the hub in full, others without their folder."""
    return ", ".join(_code(path.name if isinstance(path, Path) else path) for path in paths) or "none"


def _code(text: str) -> str:
    return f"`{text}`"


CARD_NAME = "README.md"
_EPILOG = """\b
Examples:
  headrace run export runs/demo --out models/demo
  headrace run export runs/demo --version 40 --out models/demo-40
  headrace run export runs/demo --out models/demo --push me/demo
  headrace run export runs/demo --tables demo-tables

The tables are metrics, states, links and work, in Parquet files, or CSV files
with --csv. `headrace fleet watch --from` and `headrace run trace --from` read them.

The hub's token is HF_TOKEN, or that of `hf auth login`. HF_ENDPOINT names another hub.
A new repository is private.
"""


@click.command(epilog=_EPILOG)
@run_argument
@click.option("--version", type=click.IntRange(0), help="Policy version of a kept checkpoint. Default: the newest.")
@click.option("--out", type=PATH, help="New folder for the model.")
@click.option("--push", metavar="REPO", help="Upload the folder to this hub repository, NAME/MODEL.")
@click.option("--tables", type=PATH, metavar="FOLDER", help="New folder for the run's records, as tables.")
@click.option("--csv", "as_csv", is_flag=True, help="Write the tables as CSV files.")
@json_option
def export(
    run: Path | None,
    version: int | None,
    out: Path | None,
    push: str | None,
    tables: Path | None,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Write a run's policy as a Hugging Face model with a card, or its records as tables."""
    run_dir = find_run(run)
    if (out is None) == (tables is None):
        raise click.UsageError("give --out FOLDER for the model, or --tables FOLDER for the records")
    if out is None or tables is not None:
        if push is not None or version is not None:
            raise click.UsageError("--push and --version are for a model: give --out FOLDER")
        assert tables is not None
        _export_tables(run_dir, tables, as_csv, as_json)
        return
    if as_csv:
        raise click.UsageError("--csv is for --tables FOLDER")
    export_model(run_dir, out, version=version)
    lines = [f"model: {out}", f"card:  {out / CARD_NAME}"]
    url = None
    if push is not None:
        url = push_model(out, push)
        lines.append(f"hub:   {url}")
    answer(as_json, {"run": run_dir, "out": out, "pushed": url}, *lines)


def _export_tables(run_dir: Path, folder: Path, as_csv: bool, as_json: bool) -> None:
    from pipeline.fleet.flow.host_records import unrecorded_words
    from pipeline.observability.exported_tables import export_tables
    from pipeline.process.progress_bar import progress

    with progress(f"exporting {run_dir.name}", total=1.0, unit="files") as bar:
        try:
            report = export_tables(run_dir, folder, as_csv=as_csv, progress=bar.reach)
        except OSError as error:
            raise DataError(f"--tables {folder}: cannot be written: {error.strerror or error}") from error
    suffix = "csv" if as_csv else "parquet"
    lines = [f"{folder / name}.{suffix}: {number:,} rows" for name, number in report.rows.items()]
    if report.num_skipped:
        lines.append(f"{report.num_skipped:,} damaged files or lines were skipped")
    if missing := unrecorded_words(report.without_messages):
        lines.append(missing)
    answer(as_json, {"run": run_dir, "tables": folder, "report": report}, *lines)


def export_model(run_dir: Path, out: Path, *, version: int | None) -> Path:
    """Copy the model of a checkpoint to ``out``, with its card, and return ``out``. The checkpoint
    is verified first; the folder appears whole or not at all.

    Raises ConfigError if ``out`` exists or no checkpoint has ``version``, DataError if there is no
    checkpoint or it is damaged."""
    from pipeline.config.load import read_resolved
    from pipeline.observability.history import HISTORY_NAME, run_history
    from pipeline.process.progress_bar import progress
    from pipeline.training.checkpoints import CHECKPOINTS, list_checkpoints, read_checkpoint

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists; give a new or an empty folder")
    config = read_resolved(run_dir)
    found = {checkpoint.version: checkpoint for checkpoint in list_checkpoints(run_dir / CHECKPOINTS)}
    if not found:
        raise DataError(f"{run_dir} has no checkpoint yet; checkpoint.every_updates sets when one is written")
    if version is not None and version not in found:
        kept = ", ".join(map(str, sorted(found)))
        raise ConfigError(
            f"{run_dir} holds no checkpoint of version {version}; expected one of {kept} (checkpoint.keep sets how many)"
        )
    chosen = list(found.values())[-1] if version is None else found[version]
    with progress(f"verifying {chosen.path.name}"):
        model = read_checkpoint(chosen.path).path / "model"
    if not (model / "config.json").is_file():
        raise DataError(
            f"{chosen.path} has no model: the run's learner.backend does not write one; only runs with a built-in backend "
            "can be exported"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    sizes = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    with progress("copying the model", total=sizes / 1e6, unit="MB") as bar:

        def copied(source: str, target: str) -> str:
            shutil.copy2(source, target)
            bar.advance(Path(source).stat().st_size / 1e6)
            return target

        shutil.copytree(model, partial, copy_function=copied)
    card = model_card(config, run_history(run_dir / HISTORY_NAME).read()[0], chosen.version)
    (partial / CARD_NAME).write_text(card, encoding="utf-8")
    # The target is absent or an empty folder.
    return partial.rename(out)


def push_model(folder: Path, repository: str) -> str:
    """Upload a folder to a repository of the hub, which is created private if it is new, and return
    its address. Raises ConfigError if the hub refuses the name or the token, HeadraceError if it is
    out of reach."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )

    from pipeline.data.hub import uploading

    left = f"the model is in {folder}; `headrace run export` with --push can be repeated with another --out"
    try:
        api = HfApi()
        made = api.create_repo(repository, exist_ok=True, private=True)
        files = {path: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
        added = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
        with uploading(f"to {made.repo_id}", sum(files.values())) as upload:
            # One by one, so that the progress is known; a single commit then names them all.
            for one, num_bytes in zip(added, files.values(), strict=True):
                with upload.file(one.path_in_repo, num_bytes):
                    api.preupload_lfs_files(made.repo_id, [one])
            api.create_commit(made.repo_id, added, commit_message="headrace run export")
    except HFValidationError as error:
        raise ConfigError(f"--push {repository}: {error}; expected NAME/MODEL; {left}") from error
    except HfHubHTTPError as error:
        code = error.response.status_code
        token = "; give a token with write access, by HF_TOKEN or `hf auth login`" if code in (401, 403) else ""
        raise ConfigError(f"--push {repository}: the hub refused with status {code}{token}; {left}") from error
    # The package has no error class for files that are too large.
    except (RuntimeError, ValueError) as error:
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise HeadraceError(f"--push {repository}: the upload failed ({reason}); try again; {left}") from error
    except (OSError, HTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HeadraceError(
            f"--push {repository}: the hub is out of reach ({reason}); check the network or HF_ENDPOINT; {left}"
        ) from error
    return str(made)
