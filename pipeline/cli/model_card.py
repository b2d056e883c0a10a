"""The model card of an exported policy: data, algorithm, versions, settings and curve.

Its figures are those of the run's history up to the exported version. Folders of this machine are
not named: a path becomes the last part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.describe import in_toml, settings
from pipeline.config.public import public_settings
from pipeline.config.schema import RunConfig
from pipeline.config.unread import given_keys
from pipeline.data.hub import hub_name
from pipeline.observability.history import EvaluationRow, Row, UpdateRow
from pipeline.preflight.packages import installed

_MOST_ROWS = 20
"""Updates that the curve shows, the first and the last among them."""
_LIBRARIES = ("headrace", "torch", "transformers")


def model_card(config: RunConfig, rows: Iterable[Row], version: int) -> str:
    """Return the card, in Markdown, of the policy ``version`` of a run with these rows."""
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
    """Return the given settings as TOML. A run's file has every path whole, so a folder that was
    given and one of a default's name look alike; neither would tell more than its name."""
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
    """Return the lines of the training data."""
    data = config.data
    if data.responses:
        return [f"* training: recorded responses of {_files(data.responses)}"]
    sets = [f"  * {one.name}, weight {one.weight:g}: {_files(one.train)}" for one in data.sets]
    return [f"* training: {_files(data.train)}" if data.train else "* training: several sets", *sets]


def _files(paths: Sequence[Path | str]) -> str:
    """Return files in words: names on the hub whole, others without their folder."""
    return ", ".join(_code(path.name if isinstance(path, Path) else path) for path in paths) or "none"


def _code(text: str) -> str:
    return f"`{text}`"
