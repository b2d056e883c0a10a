"""Claims about the committed start model: small, loadable, of the quality that its card states."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.demo.make_tiny_model import EOS, SYMBOLS, build_model, build_tokenizer, demonstrate, is_right, respond
from ops.demo.task import MAX_RESPONSE_TOKENS, MAX_TERMS, MIN_TERMS, Split, draw, generate, write_response

FOLDER = Path(__file__).parents[3] / "ops" / "demo" / "tiny_model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def greedy(model, tokenizer):
    """Which of the held-out problems are answered right, greedily."""
    problems = list(generate(Split.HELD_OUT, 512, seed=0))
    texts = respond(model, tokenizer, [problem.prompt for problem in problems])
    return [is_right(*pair) for pair in zip(problems, texts, strict=True)]


def test_the_whole_folder_is_at_most_two_megabytes_in_float32():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 2_000_000
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118  not a mapping


def test_heads_are_wide_enough_and_positions_enough_for_the_longest_chain(model):
    assert model.config.head_dim >= 32
    assert model.config.max_position_embeddings >= 3 * MAX_TERMS + MAX_RESPONSE_TOKENS
    assert not model.config.tie_word_embeddings


def test_the_tokenizer_takes_one_token_a_character_and_round_trips(tokenizer):
    rng = random.Random(1)
    for _ in range(50):
        problem = draw(rng, Split.TRAIN, rng.randint(MIN_TERMS, MAX_TERMS))
        text = problem.prompt + write_response(problem.counter)
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.encode(EOS) == [tokenizer.eos_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_the_committed_tokenizer_and_shape_are_those_of_the_script(tokenizer, model):
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab() == {symbol: i for i, symbol in enumerate(SYMBOLS)}
    fresh = build_model(seed=0)
    assert {name: p.shape for name, p in fresh.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_the_demonstrator_errs_on_borrows_and_only_there():
    rng = random.Random(2)
    problems = [draw(rng, Split.TRAIN, num_terms=4) for _ in range(400)]
    right = {p: demonstrate(p, rng) == write_response(p.counter) for p in problems}
    assert all(right[p] for p in problems if p.num_borrows == 0)
    assert 0.2 < sum(right[p] for p in problems if p.num_borrows == 1) / sum(p.num_borrows == 1 for p in problems) < 0.5


def test_greedy_accuracy_leaves_room_and_samples_carry_signal(model, tokenizer, greedy):
    assert 0.20 <= sum(greedy) / len(greedy) < 0.50
    problems = list(generate(Split.HELD_OUT, 48, seed=0))
    prompts = [problem.prompt for problem in problems]
    rng = torch.Generator().manual_seed(1)
    rounds = [respond(model, tokenizer, prompts, rng) for _ in range(8)]
    groups = [[is_right(problem, text) for text in texts] for problem, *texts in zip(problems, *rounds, strict=True)]
    assert sum(0 < sum(group) < 8 for group in groups) / len(groups) >= 0.3


def test_the_card_states_the_measured_accuracy_and_the_command(greedy):
    card = (FOLDER / "README.md").read_text()
    assert "python -m ops.demo.make_tiny_model --out ops/demo/tiny_model --seed" in card
    found = re.search(r"greedy accuracy \| ([\d.]+)%", card)
    assert found is not None
    assert sum(greedy) / len(greedy) == pytest.approx(float(found[1]) / 100, abs=0.01)
