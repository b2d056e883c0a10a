"""Claims about the real model's task: repeatable, right, apart, as the run file expects it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ops.demo import sums
from ops.demo.sums import QUESTIONS, Sum, generate
from ops.demo.task import Split
from pipeline.config.load import load_config
from pipeline.rewards.arithmetic import verify
from pipeline.rewards.verifier import Response, Verdict

ROOT = Path(__file__).parents[3]
SIZES = {Split.TRAIN: 2688, Split.HELD_OUT: 128}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for folder, seed in (("one", "0"), ("same", "0"), ("other", "1")):
        sums.main(["--out", str(tmp_path / folder), "--seed", seed])
    for name, size in (("train.jsonl", 2688), ("heldout.jsonl", 128)):
        one, same, other = ((tmp_path / folder / name).read_bytes() for folder in ("one", "same", "other"))
        assert one == same != other
        assert len(set(one.splitlines())) == size


def test_every_answer_is_right_and_the_verifier_reads_it() -> None:
    for split, size in SIZES.items():
        for one in generate(split, size, seed=0):
            first, second = map(int, re.findall(r"\d+", one.question))
            right = first + second
            text = f"{first} and {second} make {right}."
            given = Response(prompt_text="", response_text=text, answer=str(one.row["answer"]), verifier="arithmetic")
            (outcome,) = verify([given])
            assert isinstance(outcome, Verdict) and outcome.accuracy == 1.0


def test_no_held_out_sum_is_trained_on_in_another_order_or_other_words() -> None:
    def numbers(split: Split) -> set[tuple[int, ...]]:
        return {tuple(sorted((one.first, one.second))) for one in generate(split, SIZES[split], seed=3)}

    assert numbers(Split.TRAIN).isdisjoint(numbers(Split.HELD_OUT))


def test_a_side_that_is_too_small_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sums.main(["--out", str(tmp_path), "--heldout", "100000"])
    assert "fewer than the requested 100000; ask for fewer" in capsys.readouterr().err


def test_the_example_in_the_documentation_and_the_run_file_are_of_this_task() -> None:
    config = load_config([ROOT / "configs" / "smollm2.toml", ROOT / "configs" / "fleets" / "smollm2.toml"])
    assert Sum(23, 15, QUESTIONS[2]).question in (sums.__doc__ or "")
    assert [*config.data.train, *config.data.evaluation] == [
        Path(f"runs/sums-data/{split}.jsonl") for split in (Split.TRAIN, Split.HELD_OUT)
    ]
