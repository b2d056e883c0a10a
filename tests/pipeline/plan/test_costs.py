"""Claims about costs: what a file says is what is computed with, and a wrong file is one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.plan.costs import (
    Costs,
    GeneratorCosts,
    LearnerCosts,
    LedgerCosts,
    ScorerCosts,
    WeightsCosts,
    read_costs,
    write_costs,
)
from protocol.errors import ConfigError
from protocol.ids import Role

SMALLEST = "[learner]\ntoken_s = 1.0\n[generator]\ndecode_base_s = 1.0\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "costs.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    costs = Costs(
        generator=GeneratorCosts(slots=12, decode_base_s=0.01, decode_sequence_s=2e-5, prefill_token_s=1e-6),
        learner=LearnerCosts(base_s=0.2, token_s=1e-4, publish_s=0.05),
        reward=ScorerCosts(piece_s=0.002, concurrency=4),
        weights=WeightsCosts(num_bytes=2.7e8),
        source="a run",
    )
    write_costs(costs, path := tmp_path / "costs.toml")
    assert read_costs(path) == costs


def test_times_are_sums_of_what_the_work_has() -> None:
    generator = GeneratorCosts(decode_base_s=1.0, decode_sequence_s=0.5, decode_context_token_s=0.01)
    assert generator.decode_s(4, 100) == pytest.approx(1 + 2 + 1)
    learner = LearnerCosts(base_s=1.0, sequence_s=0.1, token_s=0.01, update_s=3.0, publish_s=4.0)
    assert learner.compute_s(10, 100, steps=2) == pytest.approx(2 + 1 + 1)
    assert learner.whole_update_s(10, 100, steps=2) == pytest.approx(4 + 7)
    assert ScorerCosts(base_s=1.0, piece_s=0.5, token_s=0.1).batch_s(2, 10) == pytest.approx(3.0)
    assert WeightsCosts(num_bytes=1e9, bytes_per_s=1e9, travel_base_s=0.5).travel_s == pytest.approx(1.5)


def test_the_ledgers_defaults_are_the_servers_measured_time_within_a_tenth() -> None:
    for tokens, measured_s in ((1024, 241e-6), (4096, 351e-6), (16384, 774e-6)):
        assert LedgerCosts().served_s(tokens) == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[generator]\n", r"\[learner\] is missing.*found generator"),
        (SMALLEST + "[judge]\n", r"unknown key 'judge'; expected generator, learner, reward"),
        (
            "[generator]\ndecode = 1\n[learner]\n",
            r"unknown key 'decode' in \[generator\]; expected slots, decode_base_s",
        ),
        (SMALLEST + "[reward]\nspeed = 1\n", r"unknown key 'speed' in \[reward\]; expected base_s, piece_s"),
        ("[generator]\n[learner]\ntoken_s = -1.0\n", r"learner\.token_s is -1\.0; expected `float` >= 0"),
        ("[generator]\nslots = 0\n[learner]\n", r"generator\.slots is 0; expected `int` >= 1"),
        ("[generator]\nslots = 'many'\n[learner]\n", r"generator\.slots is 'many'; expected `int`"),
        ("[generator\n", r"is not TOML"),
        ("[generator]\ndecode_base_s = inf\n[learner]\n", r"generator\.decode_base_s is inf; expected a finite number"),
        ("[generator]\n[learner]\ntoken_s = 1.0\n", r"a decode step takes no time"),
        ("[generator]\ndecode_base_s = 1.0\n[learner]\n", r"an update takes no time"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_the_key(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_costs(written(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_costs(tmp_path / "none.toml")


def test_a_role_without_costs_is_named(tmp_path: Path) -> None:
    costs = read_costs(written(tmp_path, SMALLEST + "[reward]\npiece_s = 0.5\n"))
    assert costs.scorer(Role.REWARD).piece_s == 0.5
    with pytest.raises(ConfigError, match=r"costs\.toml have no reference"):
        costs.scorer(Role.REFERENCE)
