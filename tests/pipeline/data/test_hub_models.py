"""Claims about models on the hub, by the real client against a hub on loopback."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config, resolve_paths
from pipeline.data.hub import hub_name, pin_models
from protocol.errors import ConfigError
from tests.pipeline.data import test_hub
from tests.pipeline.data.test_hub import COMMIT, GATED, PLAIN, PRIVATE, TOKEN, endpoint, run_on_hub
from tests.pipeline.op_config import MODEL, write_config

__all__ = ["endpoint"]
SCRIPT = """
import json, sys
from pathlib import Path
from pipeline.config.load import load_config, resolve_paths
from pipeline.data.hub import hub_name, pin_models
from pipeline.preflight.model_folder import read_model_config
from protocol.errors import ConfigError
for name in sys.argv[2:]:
    try:
        config = pin_models(resolve_paths(load_config([Path(sys.argv[1])], [f"{key}={name}" for key in KEYS])))
        path = config.model.path
        assert config.value.path == config.model.reference_path == config.reward.model.path == path
        files = sorted(file.name for file in path.iterdir())
        kind = read_model_config(path)["model_type"]
        print(json.dumps({"path": str(path), "name": hub_name(path), "files": files, "type": kind}))
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
"""
KEYS = ["model.path", "model.reference_path", "value.path", "reward.model.path"]


@pytest.fixture(autouse=True)
def model_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub holds the demo's model, and weights that are pickled."""
    held = {file.name: file.read_bytes() for file in MODEL.iterdir()}
    monkeypatch.setattr(test_hub, "FILES", held | {"pytorch_model.bin": b"pickled"})


def pinned(folder: Path, hub: str, *names: str, **more: str) -> list[dict[str, Any]]:
    """Pin each name as the model of every role."""
    return run_on_hub(f"KEYS = {KEYS}\n{SCRIPT}", folder, hub, str(write_config(folder)), *names, **more)


def test_a_model_on_the_hub_becomes_the_folder_of_its_commit(tmp_path: Path, endpoint: str) -> None:
    (found,) = pinned(tmp_path, endpoint, f"hf://{PLAIN}")
    assert found["path"].startswith(str(tmp_path / "cache"))
    assert Path(found["path"]).name == COMMIT
    assert found["name"] == f"{PLAIN}@{COMMIT}"
    assert found["type"] == json.loads((MODEL / "config.json").read_text())["model_type"]
    assert "model.safetensors" in found["files"]
    assert "pytorch_model.bin" not in found["files"], "pickled weights are not fetched"


def test_a_fetched_model_comes_from_the_cache_without_a_network(tmp_path: Path, endpoint: str) -> None:
    names = [f"hf://{PLAIN}", f"hf://{PLAIN}@{COMMIT}"]
    first = pinned(tmp_path, endpoint, *names)
    assert first[0] == first[1]
    assert pinned(tmp_path, endpoint, *names, HF_HUB_OFFLINE="1") == first
    assert pinned(tmp_path, "http://127.0.0.1:9", *names) == first


def test_a_model_that_cannot_be_had_is_refused_with_the_remedy(tmp_path: Path, endpoint: str) -> None:
    cases = {
        "hf://acme/none": "has no model acme/none, or it is private; correct the name, or set HF_TOKEN",
        f"hf://{PRIVATE}": "or it is private",
        f"hf://{GATED}": "access must be requested from its owners; accept their terms at",
        f"hf://{PLAIN}@v9": "no such revision; name a branch, a tag or a commit",
        "hf://sums": "expected hf://OWNER/NAME",
    }
    for (name, words), found in zip(cases.items(), pinned(tmp_path, endpoint, *cases), strict=True):
        assert words in found.get("error", ""), (name, found)
    (found,) = pinned(tmp_path, endpoint, f"hf://{PRIVATE}", HF_TOKEN=TOKEN)
    assert found["name"] == f"{PRIVATE}@{COMMIT}"


def test_a_network_that_refuses_a_model_is_named_with_the_remedy(tmp_path: Path) -> None:
    for settings in ({}, {"HF_HUB_OFFLINE": "1"}):
        (found,) = pinned(tmp_path, "http://127.0.0.1:9", f"hf://{PLAIN}", **settings)
        assert "http://127.0.0.1:9 cannot be reached, and the cache" in found["error"]
        assert "hf download acme/sums" in found["error"]


def test_a_local_model_stays_as_it_is(tmp_path: Path) -> None:
    config = resolve_paths(load_config([write_config(tmp_path)]))
    assert pin_models(config) is config
    assert hub_name(config.model.path) is None
    with pytest.raises(ConfigError, match="expected hf://OWNER/NAME"):
        pin_models(resolve_paths(load_config([write_config(tmp_path)], ["model.path=hf://a/b/c"])))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("given", ["m.q4.gguf", "weights", "."])
def test_a_gguf_file_is_refused_with_the_command_that_converts_it(tmp_path: Path, key: str, given: str) -> None:
    config = write_config(tmp_path)
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "m.q4.gguf").write_bytes(b"GGUF\3\0\0\0")
    (folder / "weights").write_bytes(b"GGUF\3\0\0\0")
    loaded = load_config([config], [f"{key}={folder / given}"])
    with pytest.raises(ConfigError, match=r"is a GGUF file; .*pip install 'headrace\[gguf\]'") as refusal:
        pin_models(resolve_paths(loaded))
    words = shlex.split(str(refusal.value).split("`")[1])
    file = folder / ("weights" if given == "weights" else "m.q4.gguf")
    assert words[:4] == ["python", "-m", "workers.engines.convert_gguf", str(file)]
    assert not Path(words[4]).exists(), "the new folder is not in the way of the file"
    assert len(words) == 5


def test_a_model_folder_that_has_a_gguf_file_too_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "m.gguf").write_bytes(b"GGUF\3\0\0\0")
    config = load_config([write_config(tmp_path)], [f"model.path={folder}"])
    assert pin_models(config).model.path == folder
