"""``headrace simulate``: figures for people and programs, a picture, and one sentence for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.cli import main
from pipeline.config.load import load_config

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


def test_a_file_of_means_gives_lengths_prompts_and_groups_without_signal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    told = tmp_path / "lengths.toml"
    words = (
        *LOCAL,
        "--costs",
        costs_file(tmp_path, COSTS.replace("base_s = 1.0", "token_s = 1e-3")),
        "--lengths",
        str(told),
    )

    def simulated(text: str) -> dict[str, Any]:
        told.write_text(text)
        return json.loads(run(capsys, *words, "--json"))

    plain, mixed, prompts = map(
        simulated,
        (
            "response_tokens = 20\n",
            "response_tokens = 20\ntrained_share = 0.5\n",
            "response_tokens = 20\nprompt_tokens = 80\n",
        ),
    )
    found = [sum(update[n] for update in plain["updates"]) for n in ("num_tokens", "num_sequences")]
    assert found[0] / found[1] == pytest.approx(20, rel=0.1)
    assert plain["dropped"] == {} and mixed["dropped"]["no_signal"] > 0
    assert mixed["tokens_per_s"] / mixed["sampled_per_s"] == pytest.approx(0.5, abs=0.1)
    # read by the learner: by default prompts of half of the longest
    longest = load_config([Path("configs/demo.toml")]).data.max_prompt_tokens
    for found, tokens in ((plain, longest / 2), (prompts, 80)):
        update = found["updates"][-1]
        assert update["compute_s"] == pytest.approx(1e-3 * (update["num_tokens"] + tokens * update["num_sequences"]))


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
    assert "or a response's tokens on each line" in run(capsys, *words, "--lengths", str(lengths), code=2)
    lengths.write_text("0\n")
    assert "expected 1 or more each" in run(capsys, *words, "--lengths", str(lengths), code=2)
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert "simulation needs simpy, which is not installed: pip install 'headrace[plan]'" in run(capsys, *words, code=2)
