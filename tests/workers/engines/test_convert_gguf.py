# pyright: reportMissingImports=false
"""Claims about models from GGUF: the same numbers and tokens, and whole folders only. Most need
`make test-lora`'s environment, which has gguf and accelerate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pipeline.data.end_tokens import end_tokens
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.model_folder import read_model_config
from protocol.errors import ConfigError, DataError
from workers.engines.convert_gguf import convert, main
from workers.engines.model.loading import load_model

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ("12 plus 345 is  6", "two  spaces, a tab\t1", "<|im_start|>user\n1<|im_end|>\n")
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def trained_tokenizer() -> Tokenizer:
    """One that cuts off each digit, as SmolLM's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*TEXTS, "plus  is  spaces  \t tab"] * 20, trainer)
    return tokenizer


def tiny_llama(num_tokens: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=num_tokens, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_gguf(file: Path, model: PreTrainedModel, tokenizer: Tokenizer, *, way: str, template: bool = True) -> None:
    """Write a model as llama.cpp's converter does: queries and keys with their halves interleaved."""
    import gguf

    config: Any = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(way)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if template:
        writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    names = dict(TOP)
    for number in range(config.num_hidden_layers):
        names |= {f"blk.{number}.{own}": f"model.layers.{number}.{theirs}" for own, theirs in LAYER.items()}
    for own, theirs in names.items():
        value: np.ndarray = state[f"{theirs}.weight"].numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(theirs[-6:])
        if heads is not None:
            value = value.reshape(heads, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"{own}.weight", np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel, Tokenizer]:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tokenizer = trained_tokenizer()
    model = tiny_llama(tokenizer.get_vocab_size())
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, model, tokenizer, way="smollm")
    return file, model, tokenizer


def test_the_folder_has_the_files_numbers_tokens_and_template(
    made: tuple[Path, PreTrainedModel, Tokenizer], tmp_path: Path
) -> None:
    file, model, tokenizer = made
    folder = tmp_path / "new" / "model"
    assert convert(file, folder, "float32") == []
    assert "quantization_config" not in read_model_config(folder)
    loaded = load_model(folder, torch.float32, torch.device("cpu"))
    text = load_text_tokenizer(folder)
    for line in TEXTS:
        tokens = tokenizer.encode(line).ids
        assert text.encode(line) == tokens, line
        assert AutoTokenizer.from_pretrained(folder)(line)["input_ids"] == tokens, line
        with torch.no_grad():
            got, expected = (one(torch.tensor([tokens])).logits for one in (loaded, model))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert text.apply_chat_template([{"role": "user", "content": "1"}]) == TEXTS[-1]
    assert set(end_tokens(folder, text, ())) == {text.token_id("<|im_end|>")} == {2}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_what_a_file_lacks_is_told(made: tuple[Path, PreTrainedModel, Tokenizer], tmp_path: Path) -> None:
    _, model, tokenizer = made
    write_gguf(tmp_path / "odd.gguf", model, tokenizer, way="a-way-of-its-own", template=False)
    cut, talk = convert(tmp_path / "odd.gguf", tmp_path / "odd")
    assert "pre-tokenizer is 'a-way-of-its-own'" in cut
    assert "no chat template" in talk
    assert load_model(tmp_path / "odd", torch.bfloat16, torch.device("cpu")).dtype == torch.bfloat16


def test_an_interrupted_conversion_leaves_nothing(
    made: tuple[Path, PreTrainedModel, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        assert not (tmp_path / "model").exists(), "a kill at this moment leaves no such folder"
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(made[0], tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_damaged_is_refused(made: tuple[Path, PreTrainedModel, Tokenizer], tmp_path: Path) -> None:
    whole = made[0].read_bytes()
    for name, data in (("cut", whole[: len(whole) // 2]), ("empty", b""), ("other", b"GGUF" + bytes(64))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name} does not load as a causal language model"):
            convert(tmp_path / name, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_missing_file_a_taken_folder_and_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="none: no such file"):
        convert(tmp_path / "none", tmp_path / "model")
    (tmp_path / "some").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="exists; name a folder that does not"):
        convert(tmp_path / "some", tmp_path)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert main([str(tmp_path / "some"), str(tmp_path / "model")]) == 2
    assert "reading GGUF needs accelerate; pip install 'headrace[gguf]'" in capsys.readouterr().err
