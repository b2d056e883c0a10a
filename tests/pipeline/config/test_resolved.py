"""The glance at a run's settings agrees with the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config import CHANGES_NAME, RESOLVED_NAME
from pipeline.config.load import load_config, read_resolved, write_resolved
from pipeline.config.resolved import LightConfig, read_light, wanted_updates
from protocol.errors import ConfigError

SETTINGS = (
    "run.name='seen'",
    "algorithm.name='vapo'",
    "ledger.max_memory_mb=321",
    "supervisor.silent_after_s=7.5",
    "supervisor.stuck_after_s=90",
    "value.min_explained_variance=0.25",
    "value.pretrain_steps=7",
    "value.batch_trajectories=64",
    "run.num_updates=77",
    "fleet.max_generators=8",
    "fleet.min_generators=0",
)
LEAST = ("run.name='seen'",)


def _values(found: LightConfig, config: Any) -> tuple[Any, Any]:
    """Every setting of a glance, and the same of the whole configuration."""
    plain = msgspec.to_builtins(found)
    same = {name: {key: getattr(getattr(config, name), key) for key in section} for name, section in plain.items()}
    return plain, same


@pytest.mark.parametrize("settings", [SETTINGS, LEAST])
def test_a_glance_holds_what_the_schema_reads_out_of_the_same_file(tmp_path: Path, settings: tuple[str, ...]) -> None:
    write_resolved(load_config([Path("configs/demo.toml")], settings), tmp_path)
    seen, same = _values(read_light(tmp_path), read_resolved(tmp_path))
    assert seen == same


def test_a_file_without_some_of_the_settings_is_read_with_their_defaults(tmp_path: Path) -> None:
    (tmp_path / RESOLVED_NAME).write_text(Path("configs/demo.toml").read_text())
    seen, same = _values(read_light(tmp_path), load_config([Path("configs/demo.toml")]))
    assert seen == same


def test_a_folder_that_holds_no_run_or_a_broken_file_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        read_light(tmp_path)
    (tmp_path / RESOLVED_NAME).write_text("[run\n")
    with pytest.raises(ConfigError, match="not TOML"):
        read_light(tmp_path)


def test_a_run_makes_as_many_updates_as_its_newest_change_says(tmp_path: Path) -> None:
    write_resolved(load_config([Path("configs/demo.toml")], SETTINGS), tmp_path)
    assert wanted_updates(tmp_path, read_light(tmp_path)) == 77
    (tmp_path / CHANGES_NAME).write_text(
        '[{"holds": {"run.num_updates": "90"}}, {"holds": {"run.num_updates": "900"}}]'
    )
    assert wanted_updates(tmp_path, read_light(tmp_path)) == read_resolved(tmp_path).run.num_updates == 900
    (tmp_path / CHANGES_NAME).write_text("[]")
    with pytest.raises(ConfigError, match=CHANGES_NAME):
        wanted_updates(tmp_path, read_light(tmp_path))
