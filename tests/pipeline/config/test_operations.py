"""Claims about ``[sinks]``."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.unread import unread
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config


def test_a_project_has_an_entity_or_none_and_is_no_url(tmp_path: Path) -> None:
    for good in ("project", "team/my-project.2"):
        assert op_config(tmp_path, f"sinks.wandb={good}").sinks.wandb == good
    for bad in ("https://wandb.ai/team/project", "team/project/run", "a b"):
        with pytest.raises(ConfigError, match="PROJECT or ENTITY/PROJECT"):
            op_config(tmp_path, f'sinks.wandb="{bad}"')


def test_a_tracking_uri_is_a_server_or_a_file_of_sqlite_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert op_config(tmp_path, "sinks.mlflow=https://mlflow.example/").sinks.mlflow == "https://mlflow.example"
    assert op_config(tmp_path, "sinks.mlflow=sqlite:///a.db").sinks.mlflow == f"sqlite:///{tmp_path}/a.db"
    assert op_config(tmp_path, "sinks.mlflow=sqlite:////x/a.db").sinks.mlflow == "sqlite:////x/a.db"
    for bad in ("./mlruns", "file:///x/mlruns", "databricks", "sqlite:///", "http://"):
        with pytest.raises(ConfigError, match="expected http://HOST:PORT, https://HOST or sqlite:///FILE"):
            op_config(tmp_path, f"sinks.mlflow={bad}")


@pytest.mark.parametrize("uri", ["http://user:secret-of-a-test@host:5000", "https://host/?api_token=secret-of-a-test"])
def test_a_tracking_uri_with_a_secret_is_refused_and_not_repeated(tmp_path: Path, uri: str) -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_TOKEN") as caught:
        op_config(tmp_path, f"sinks.mlflow={uri}")
    assert "secret-of-a-test" not in str(caught.value)


def test_settings_of_a_sink_that_is_not_set_are_named_as_unread(tmp_path: Path) -> None:
    config = op_config(tmp_path, "sinks.wandb_mode=offline", "sinks.mlflow_experiment=x")
    assert set(unread(config)) == {"sinks.wandb_mode", "sinks.mlflow_experiment"}
