"""Claims about the files that a joining generator fetches to read recorded responses."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.load import load_config
from pipeline.supervisor.joining.manifest import make_manifest
from protocol.ids import Role
from tests.pipeline.op_config import write_config


def test_a_joining_generator_gets_the_files_of_recorded_responses(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_text('{"prompt": "1+1=", "response": "2", "verdict": 1}\n')
    recorded = ("data.train=[]", f"data.responses=['{file}']", "algorithm.name=sft", "algorithm.group_size=1")
    manifest, served = make_manifest(load_config([write_config(tmp_path)], recorded))
    place = "data/responses-0/responses.jsonl"
    (found,) = [one for one in manifest.files_of(Role.GENERATOR) if one.place == place]
    assert served[found.digest] == file
    assert manifest.settings["data"]["responses"] == [place]
