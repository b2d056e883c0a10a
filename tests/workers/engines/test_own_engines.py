"""An engine named by its import path is made by that function, from the run's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import RunConfig
from pipeline.preflight.engines import check_engines
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config
from workers.engines.build import build_engine, build_scoring_engine, build_training_backend, build_value_engine

NO_FUNCTION = 3
BUILDERS = {
    "generation.engine": build_engine,
    "reference.backend": build_scoring_engine,
    "learner.backend": build_training_backend,
    "value.backend": build_value_engine,
}


def make(config: RunConfig) -> Any:
    return config.engines.settings["made"]


@pytest.mark.parametrize("setting", BUILDERS)
def test_the_named_function_makes_the_engine_with_its_settings(tmp_path: Path, setting: str) -> None:
    config = op_config(tmp_path, f"{setting}={__name__}:make", "engines.settings.made=this one")
    assert check_engines(config) == []
    assert BUILDERS[setting](config) == "this one"


@pytest.mark.parametrize("setting", BUILDERS)
def test_what_makes_no_engine_is_refused_with_the_setting(tmp_path: Path, setting: str) -> None:
    for name, complaint in (
        (f"{__name__}:NO_FUNCTION", "expected a function"),
        (f"{__name__}:makes", "did you mean 'make"),
    ):
        with pytest.raises(ConfigError, match=rf"{setting} .*{complaint}"):
            BUILDERS[setting](op_config(tmp_path, f"{setting}={name}"))


@pytest.mark.parametrize("setting", BUILDERS)
def test_a_package_that_is_not_there_is_refused_before_the_start(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} .*no package 'nowhere_at_all'"):
        check_engines(op_config(tmp_path, f"{setting}=nowhere_at_all.engines:make"))


@pytest.mark.parametrize("setting", BUILDERS)
def test_a_name_that_is_neither_built_in_nor_an_import_path_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=r"expected one of .*, or package\.module:function"):
        op_config(tmp_path, f"{setting}=remote")
