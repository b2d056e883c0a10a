"""Claims about the tables' task: right responses are right, the habit errs at the beginning alone,
sides are apart."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from ops.bench.ablation import start_models
from ops.bench.ablation.long_chains import Chain, Kind, draw, generate, write_file
from ops.demo.task import Split
from pipeline.preflight.model_folder import ValueSource, value_source
from pipeline.rewards.arithmetic import last_number


def test_a_chain_is_a_working_laps_and_an_answer() -> None:
    chain = Chain(Kind.SHORT, 2, (4, 3), laps=2)
    laps = f"2{string.ascii_uppercase}1{string.ascii_uppercase}"
    assert (chain.prompt, chain.respond(), chain.answer) == ("a2b<4c<3*2=", f"a2b8c5~{laps}=5", "5")
    turned = chain.respond(random.Random(0), wrong_turns=1.0)
    assert turned == f"a2b2c1~{laps}=1", "it turns back at 0"
    assert Chain(Kind.LONG, 7, (5,), laps=1).counter(random.Random(0), 1.0) == [7, 6], "and at 9"


@pytest.mark.parametrize("kind", Kind)
def test_right_responses_have_the_answer_and_fit_the_lengths_of_the_tables(kind: Kind) -> None:
    rng = random.Random(1)
    chains = [draw(rng, Split.TRAIN, kind) for _ in range(300)]
    assert all(last_number(chain.respond()) == last_number(chain.answer) for chain in chains)
    lengths = [len(chain.respond()) + 1 for chain in chains]
    assert max(lengths) < 270 and max(len(chain.prompt) for chain in chains) <= 20
    assert (min(lengths) > 250) is (kind is Kind.LONG)


def test_the_demonstrator_errs_at_the_ends_of_the_scale_alone_and_mostly() -> None:
    rng = random.Random(2)
    chains = [draw(rng, Split.TRAIN) for _ in range(400)]
    assert all(chain.num_turns for chain in chains if chain.respond(rng) != chain.respond())
    once = [chain.respond(rng) == chain.respond() for chain in chains if chain.num_turns == 1]
    assert 0.15 < sum(once) / len(once) < 0.45


def test_train_and_held_out_share_no_prompt_and_both_kinds_come_in_turn(tmp_path: Path) -> None:
    sides = [list(generate(split, 64, 0)) for split in Split]
    assert not {chain.prompt for chain in sides[0]} & {chain.prompt for chain in sides[1]}
    write_file(tmp_path / "some.jsonl", Split.HELD_OUT, 6, 0)
    rows = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["short", "long"] * 3
    assert rows[0]["prompt"] == next(generate(Split.HELD_OUT, 1, 0)).prompt


def test_the_policy_is_a_language_model_of_the_tasks_alphabet_under_a_megabyte() -> None:
    policy = start_models.POLICY
    assert value_source(policy) is ValueSource.BACKBONE
    assert sum(path.stat().st_size for path in policy.iterdir()) < 1_000_000
    tokenizer = AutoTokenizer.from_pretrained(policy)
    chain = next(generate(Split.TRAIN, 1, 0))
    assert tokenizer.decode(tokenizer.encode(chain.prompt + chain.respond())) == chain.prompt + chain.respond()


def test_the_reward_model_has_a_head_of_its_own_and_is_made_once(tmp_path: Path) -> None:
    start_models.make_reward_model(tmp_path, num_steps=2)
    assert value_source(tmp_path) is ValueSource.VALUE_MODEL
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("score.weight").abs().max() > 0
    made = (tmp_path / "model.safetensors").stat().st_mtime_ns
    start_models.make_reward_model(tmp_path, num_steps=2)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == made


def test_a_policy_is_made_from_the_demos_start_model_and_demonstrations(tmp_path: Path) -> None:
    start_models.make_policy(tmp_path, ((0.5, 2),), seed=0)
    assert value_source(tmp_path) is ValueSource.BACKBONE
