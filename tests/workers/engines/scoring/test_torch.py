"""A reward model gives each response the score that a plain forward over it alone
gives, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.config.training import RewardModelSection
from protocol.errors import ConfigError, DataError, EngineError
from protocol.trajectory import Prompt
from tests.workers.engines.tiny_reward import TEMPLATE, tiny_reward_model, write_reward_model
from workers.engines.scoring.torch import TorchRewardModel, build_reward

RAGGED = ["", "4", "four", "it is 4" * 5, "\x00", "a rather long answer, " * 6, "4</s>", "no", "yes"]


def prompt(text: str = "2+2=", **extra: object) -> Prompt:
    return Prompt(prompt_id="p", tokens=np.array([1], np.int32), text=text, answer="4", verifier="x", extra=extra)


def build(folder: Path, **settings: object) -> TorchRewardModel:
    return build_reward(RewardModelSection.model_validate({"path": folder, "device": "cpu", **settings}))


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("budget", [1, 150, 100_000])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        # no padding token: the last token is read
        ("qwen3", {}),
        # padding that ends every conversation of the template too
        ("qwen3", {"pad_token_id": 257}),
        ("qwen3", {"pad_token_id": 0}),
        # an encoder: reads its first token, attends to all
        ("bert", {}),
        # capped scores, which only eager attention caps
        ("gemma2", {"attn_logit_softcapping": 0.5, "pad_token_id": 0}),
    ],
)
def test_scores_are_those_of_a_plain_unbatched_forward(
    tmp_path: Path, architecture: str, changes: dict[str, int], budget: int, template: str | None
) -> None:
    folder = write_reward_model(tmp_path, tiny_reward_model(architecture, **changes), template)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected: list[float] = []
    for text in RAGGED:
        if template is None:
            tokens = tokenizer("2+2=" + text, truncation=False)["input_ids"]
        else:
            conversation = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": text}]
            rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
            tokens = tokenizer(rendered, add_special_tokens=False, truncation=False)["input_ids"]
        with torch.no_grad():
            expected.append(float(plain(input_ids=torch.tensor([tokens])).logits[0, 0]))
    scores = build(folder, micro_batch_tokens=budget).scores([(prompt(), text) for text in RAGGED])
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.std(expected) > 0.1


def test_a_chat_model_reads_the_messages_that_the_prompt_was_made_of(tmp_path: Path) -> None:
    model = build(write_reward_model(tmp_path, template=TEMPLATE))
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2="}]
    asked = prompt("<|policy|>2+2=<|end|>", messages=messages)
    flat = prompt("2+2=")
    assert model.scores([(asked, "4")]) != model.scores([(flat, "4")])
    same = prompt("rendered by another template", messages=messages)
    assert model.scores([(asked, "4")]) == model.scores([(same, "4")])


def test_no_responses_have_no_scores(tmp_path: Path) -> None:
    assert build(write_reward_model(tmp_path)).scores([]) == []


def test_a_vocabulary_whose_every_token_ends_a_row_is_scored_without_padding(
    tmp_path: Path,
) -> None:
    model = build(write_reward_model(tmp_path))
    # as if the bytes that end a row were all there are
    model._vocabulary = 128
    tokens = [np.array([5, 6, n], np.int32) for n in range(128)]
    together = model._forward(tokens)
    alone = [score for row in tokens for score in model._forward([row])]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_a_conversation_longer_than_the_model_reads_is_refused_in_words(tmp_path: Path) -> None:
    model = build(write_reward_model(tmp_path))
    with pytest.raises(EngineError, match=r"has 305 tokens .* reads at most 256"):
        model.scores([(prompt(), "4"), (prompt(), "4" * 300)])
    shorter = build(tmp_path, max_tokens=20)
    with pytest.raises(EngineError, match="reads at most 20"):
        shorter.scores([(prompt(), "4" * 30)])
    with pytest.raises(ConfigError, match=r"max_tokens is 300, .* made for 256 positions"):
        build(tmp_path, max_tokens=300)


def test_a_score_that_is_not_finite_is_refused_in_words(tmp_path: Path) -> None:
    model = tiny_reward_model()
    head = model.get_submodule("score")
    assert isinstance(head, torch.nn.Linear)
    head.weight.data.fill_(float("nan"))
    with pytest.raises(EngineError, match="gives nan to a response to p"):
        build(write_reward_model(tmp_path, model)).scores([(prompt(), "4")])


def test_a_tokenizer_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    model = tiny_reward_model(vocab_size=100)
    with pytest.raises(EngineError, match="do not belong together"):
        build(write_reward_model(tmp_path, model)).scores([(prompt(), "4")])


def test_a_head_that_the_weights_lack_is_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_reward_model(tmp_path, tiny_reward_model("bert"))
    weights = load_file(folder / "model.safetensors")
    del weights["bert.pooler.dense.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"lacks weights .*pooler"):
        build(folder)
