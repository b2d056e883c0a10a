"""Model and prompts of the real-size run, made here, because nothing may be downloaded.

The Hugging Face folder holds a model of Qwen2-0.5B's shape with random weights, and its tokenizer
with a chat template. The prompt file holds word problems as long as GSM8K's. Files that are
complete are not made again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ops.bench.real_size.verifier import NAME as VERIFIER

END, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_WORDS = 151_643
"""Tokens besides the special ones, as in Qwen2's vocabulary."""
VOCABULARY = 151_936
"""Rows of the embedding: more than there are tokens, as in Qwen2."""
_CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NUM_PROMPTS = 512
_SEQUEL = '\nLet\'s think step by step and output the final answer after "####".'

_NAMES = ("Natalia", "Weng", "Betty", "Julie", "James", "Mark", "Albert", "Ken", "Alexis", "Tina", "Randy", "Joy")
_THINGS = ("apples", "clips", "pages", "pencils", "stickers", "cookies", "tickets", "flowers", "marbles", "cups")
_PLACES = ("the market", "her school", "the library", "a small bakery", "the garden", "his workshop", "the station")
_SENTENCES = (
    "{name} has {n} {thing} and buys {m} more at {place} on Monday.",
    "Every day {name} sells {n} {thing} to her friends for ${m} each.",
    "In the following week {name} gives away half as many {thing} as in the week before.",
    "Each box from {place} holds {n} {thing}, and {m} of the boxes are full.",
    "After {n} minutes of work {name} has made {m} {thing} at {place}.",
    "{name} spends ${n} on {thing} and puts the other ${m} into a box at {place}.",
    "A third of the {n} {thing} are broken, so {name} takes {m} of them back to {place}.",
)
_QUESTIONS = (
    "How many {thing} does {name} have altogether at the end of the week?",
    "How much money, in dollars, does {name} have left after that?",
    "If {name} goes on like this, how many {thing} will there be after {n} days?",
)


def write_problem(rng: random.Random) -> str:
    """Write one word problem: one to four sentences and a question, 20 to 90 words (GSM8K: 45 on
    average)."""
    names, things, places = rng.sample(_NAMES, 2), rng.sample(_THINGS, 2), rng.sample(_PLACES, 2)

    def fill(sentence: str) -> str:
        return sentence.format(
            name=rng.choice(names),
            thing=rng.choice(things),
            place=rng.choice(places),
            n=rng.randint(2, 240),
            m=rng.randint(2, 96),
        )

    sentences = [fill(sentence) for sentence in rng.sample(_SENTENCES, rng.randint(1, 4))]
    return " ".join([*sentences, fill(rng.choice(_QUESTIONS))])


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of Qwen2's size, trained on the problems. Pairs of its words
    fill it up to that size. No prompt contains a pair as one token, but responses of random weights
    do."""
    rng = random.Random(seed)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    trained.train_from_iterator(
        [write_problem(rng) for _ in range(4096)],
        trainers.BpeTrainer(vocab_size=1024, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    state = json.loads(trained.to_str())["model"]
    vocabulary: dict[str, int] = state["vocab"]
    merges = [tuple(merge) for merge in state["merges"]]
    pieces = list(vocabulary)
    words = [piece for piece in pieces if piece.startswith("Ġ") and len(piece) > 1]
    for first in pieces:
        # a space within a token: text is cut before spaces, so these never form
        for second in words:
            if len(vocabulary) < NUM_WORDS and first + second not in vocabulary:
                vocabulary[first + second] = len(vocabulary)
                merges.append((first, second))
    assert len(vocabulary) == NUM_WORDS, f"{len(vocabulary)} tokens, {NUM_WORDS} were wanted"
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([END, BEGIN_TURN, END_TURN])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TURN,
        pad_token=END,
        additional_special_tokens=[BEGIN_TURN, END_TURN],
        chat_template=_CHAT,
        model_max_length=32_768,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> Qwen2ForCausalLM:
    """Build a model of Qwen2-0.5B's shape with random weights: 494 million parameters, the head
    tied to the embedding."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            max_window_layers=24,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            bos_token_id=NUM_WORDS,
            eos_token_id=NUM_WORDS + 2,
        )
    )


def make_material(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Make the missing files; return the model's folder and the prompt file."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    if not prompts.is_file():
        build_model(seed).save_pretrained(model)
        build_tokenizer(seed).save_pretrained(model)
        rng = random.Random(seed)
        lines: list[str] = []
        for number in range(_NUM_PROMPTS):
            messages = [{"role": "user", "content": write_problem(rng) + _SEQUEL}]
            lines.append(json.dumps({"messages": messages, "answer": str(number), "verifier": VERIFIER}))
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return model, prompts
