from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.data.tokenizer import load_text_tokenizer
from protocol.errors import DataError

MESSAGES = [{"role": "system", "content": "hé"}, {"role": "user", "content": 'a "b" <c>\n'}]


def test_it_imports_no_transformers(model_folder: Path) -> None:
    code = """
import sys
from pathlib import Path
from pipeline.data.tokenizer import load_text_tokenizer
load_text_tokenizer(Path(sys.argv[1])).render_chat([{"role": "user", "content": "x"}])
assert not {"torch", "transformers"} & set(sys.modules)
"""
    arguments = [sys.executable, "-c", code, str(model_folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr


def test_it_agrees_with_transformers(model_folder: Path) -> None:
    ours, theirs = load_text_tokenizer(model_folder), AutoTokenizer.from_pretrained(model_folder)
    rendered = ours.render_chat(MESSAGES)
    assert rendered[0] == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered[1] == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert ours.eos_token_id is not None and ours.eos_token_id == theirs.eos_token_id
    for text in ("", "plain", "caf\u00e9 \U0001f600 , don 't ."):
        tokens = ours.encode(text)
        assert tokens == theirs(text, truncation=False)["input_ids"], text
        assert ours.decode([*tokens, ours.eos_token_id]) == theirs.decode(tokens, skip_special_tokens=True) == text


def test_special_tokens_are_added_to_plain_text_once_and_left_out_of_decoded_text(model_folder: Path) -> None:
    tokenizer = load_text_tokenizer(model_folder)
    first = tokenizer.token_id("<s>")
    assert first is not None
    assert tokenizer.encode("abcdefgh")[0] == first
    assert len(tokenizer.encode("abcdefgh")) == 9
    text, tokens = tokenizer.render_chat(MESSAGES)
    assert text.startswith("<s>")
    assert tokens.count(first) == 1
    assert tokenizer.decode(tokens) == text.removeprefix("<s>")


def test_half_a_character_decodes_to_a_replacement_sign(model_folder: Path) -> None:
    tokenizer = load_text_tokenizer(model_folder)
    assert tokenizer.decode(tokenizer.encode("é", add_special_tokens=False)[:1]) == "\ufffd"


def test_a_template_that_refuses_messages_is_a_data_error(model_folder: Path) -> None:
    with pytest.raises(DataError, match="no tools here"):
        load_text_tokenizer(model_folder).render_chat([{"role": "tool", "content": ""}])


def test_the_digest_tells_tokenizers_apart(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "other")
    assert load_text_tokenizer(tmp_path / "other").digest == load_text_tokenizer(model_folder).digest
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    assert load_text_tokenizer(tmp_path / "other").digest != load_text_tokenizer(model_folder).digest


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "save_pretrained"),
        ("tokenizer.json", b"{", "cannot be read"),
        ("tokenizer.json", b"\xff", "cannot be read"),
        ("tokenizer.json", b"{}", "not a tokenizer"),
        ("tokenizer_config.json", b"[]", "expected an object"),
    ],
)
def test_a_broken_folder_is_a_data_error(
    model_folder: Path, tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        load_text_tokenizer(folder)


def test_a_missing_folder_and_a_missing_or_broken_template_are_data_errors(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.path"):
        load_text_tokenizer(tmp_path / "nowhere")
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    with pytest.raises(DataError, match="no chat template"):
        load_text_tokenizer(tmp_path).render_chat(MESSAGES)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="does not compile"):
        load_text_tokenizer(tmp_path).render_chat(MESSAGES)
