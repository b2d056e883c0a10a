"""``headrace simulate``: figures for people and programs, a picture, and one sentence for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeline.cli import main

EMULATED = ("configs/overlap.toml", "--set", 'data.train=["x"]', "--updates", "10")
LOCAL = ("configs/demo.toml", "--updates", "4", "--set", "evaluation.every_updates=0")
COSTS = """
[generator]
decode_base_s = 0.01
[learner]
base_s = 1.0
[reward]
piece_s = 0.001
[reference]
token_s = 1e-6
[value]
token_s = 1e-6
"""


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    told = capsys.readouterr()
    assert ended.value.code == code, told.err
    return told.out if code == 0 else told.err


def costs_file(folder: Path, text: str = COSTS) -> str:
    path = folder / "costs.toml"
    path.write_text(text)
    return str(path)


def test_it_says_speed_staleness_use_and_what_holds_the_run_up(capsys: pytest.CaptureFixture[str]):
    told = run(capsys, *EMULATED, "--set", "staleness.eta=1")
    for words in ("6 updates after 4 of warm-up, 8 generators of 12 slots", "trained", "at most 1 of 1", "held up by"):
        assert words in told
    assert "costs: the emulated engines; lengths: the emulated engines' draws" in told


def test_its_json_has_each_update_and_its_picture_is_an_image(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    found = json.loads(run(capsys, *EMULATED, "--json", "--svg", str(tmp_path / "run.svg")))
    assert len(found["updates"]) == 10
    assert sum(found["staleness"].values()) == pytest.approx(1.0)
    root = ElementTree.parse(tmp_path / "run.svg").getroot()
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"learner", "slots in use", "ready units", "waiting for reward", "staleness"} <= set(texts)


def test_costs_come_from_a_file_and_lengths_from_another(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3\n5\n")
    words = (*LOCAL, "--costs", costs_file(tmp_path))
    short = json.loads(run(capsys, *words, "--lengths", str(lengths), "--json"))
    whole = json.loads(run(capsys, *words, "--json"))
    per_response = short["updates"][-1]["num_tokens"] / short["updates"][-1]["num_sequences"]
    assert 3 < per_response < 5
    assert whole["tokens_per_s"] > short["tokens_per_s"]
    assert "lengths: all of generation.max_response_tokens" in run(capsys, *words)


def test_what_is_missing_or_wrong_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    unknown = run(capsys, *LOCAL, code=2)
    assert "the costs of generation.engine local are not known: measure them with `headrace profile RUN`" in unknown
    role = run(capsys, *LOCAL, "--costs", costs_file(tmp_path, COSTS.replace("[reward]", "[rewards]")), code=2)
    assert "unknown key 'rewards'" in role
    without = run(capsys, *LOCAL, "--costs", costs_file(tmp_path, COSTS.partition("[reward]")[0]), code=2)
    assert "have no re" in without
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3\nlong\n")
    words = (*LOCAL, "--costs", costs_file(tmp_path))
    assert "expected a file with a response's tokens on each line" in run(
        capsys, *words, "--lengths", str(lengths), code=2
    )
    lengths.write_text("0\n")
    assert "expected 1 or more each" in run(capsys, *words, "--lengths", str(lengths), code=2)
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert "simulation needs simpy, which is not installed: pip install 'headrace[plan]'" in run(capsys, *words, code=2)
