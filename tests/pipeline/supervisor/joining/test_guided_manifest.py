"""Claims about the files that a joining reference worker fetches for guided passes."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.load import load_config
from pipeline.supervisor.joining.manifest import Manifest, make_manifest
from protocol.ids import Role
from tests.pipeline.op_config import MODEL, write_config


def _manifest(folder: Path, *overrides: str) -> Manifest:
    return make_manifest(load_config([write_config(folder)], overrides))[0]


def _read_by_reference(manifest: Manifest) -> set[str]:
    return {file.place for file in manifest.files_of(Role.REFERENCE)}


def test_a_reference_worker_gets_templates_and_tokenizer_where_there_is_guidance(tmp_path: Path) -> None:
    template = tmp_path / "standard.txt"
    template.write_text("{question} {gold}")
    wanted = (f'guidance.standard_template="{template}"', f'model.reference_path="{MODEL}"')
    plain = _manifest(tmp_path, *wanted)
    assert "model/tokenizer.json" not in _read_by_reference(plain)
    assert not plain.has_reference
    guided = _manifest(tmp_path, *wanted, "algorithm.guidance=mix")
    assert guided.has_reference
    assert {"standard_template", "model/tokenizer.json"} <= _read_by_reference(guided)
    assert ("guidance", "standard_template") in guided.places
    assert guided.settings["guidance"]["standard_template"] == "standard_template"
    assert "model/model.safetensors" not in _read_by_reference(guided), "its weights are of reference_path"
