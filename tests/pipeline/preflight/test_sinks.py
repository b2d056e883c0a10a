"""Claims about sinks before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.observability.sinks import seam
from pipeline.preflight.findings import Gravity
from pipeline.preflight.sinks import check_sinks
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """The packages that seem to be installed; there is no login."""
    found: set[str] = set()
    monkeypatch.setattr(seam.importlib.util, "find_spec", lambda name: object() if name in found else None)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize("setting", ["wandb=project", "mlflow=http://127.0.0.1:5000"])
def test_a_sink_without_its_package_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, installed: set[str], setting: str
) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"sinks\.{name}: .* is not installed: pip install 'headrace\[{name}\]'"):
        check_sinks(op_config(tmp_path, f"sinks.{setting}"))
    installed.add(name)
    check_sinks(op_config(tmp_path, f"sinks.{setting}"))


def test_a_file_of_sqlite_needs_its_package_too(tmp_path: Path, installed: set[str]) -> None:
    installed.add("mlflow")
    with pytest.raises(ConfigError, match=r"sqlalchemy: pip install 'headrace\[mlflow\]'"):
        check_sinks(op_config(tmp_path, "sinks.mlflow=sqlite:///a.db"))


def test_no_key_for_weights_and_biases_is_a_warning_with_what_to_do(
    tmp_path: Path, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("wandb")
    config = op_config(tmp_path, "sinks.wandb=project", "sinks.tensorboard=false")
    (found,) = check_sinks(config)
    assert found.level is Gravity.WARNING and "wandb login" in found.do
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password key-of-a-test\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert check_sinks(config)[0].level is Gravity.OK
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key-of-a-test")
    (found,) = check_sinks(config)
    assert found.level is Gravity.OK and "key-of-a-test" not in found.words
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "wandb sync" in check_sinks(config)[0].words


def test_a_run_without_sinks_says_nothing(tmp_path: Path, installed: set[str]) -> None:
    assert check_sinks(op_config(tmp_path, "sinks.tensorboard=false")) == []
    assert [found.level for found in check_sinks(op_config(tmp_path))] == [Gravity.OK]
