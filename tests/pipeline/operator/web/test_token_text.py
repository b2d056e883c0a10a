"""The text of single tokens: together they are the response."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.observability.page.figures import TokenText, split_text
from protocol.errors import DataError
from tests.byte_tokenizer import write_byte_tokenizer

TEXT = "a = 1, naïve 水 🚰 end"


def test_pieces_are_the_text_and_a_character_of_several_tokens_is_whole(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = load_text_tokenizer(tmp_path)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(ids) == len(TEXT.encode())
    pieces = TokenText(tmp_path).pieces(ids, ())
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TEXT
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_left_out_tokens_divide_the_text(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    ids = load_text_tokenizer(tmp_path).encode("abcdef", add_special_tokens=False)
    assert TokenText(tmp_path).pieces(ids, ((0, 9), (3, 100))) == list("abcdef")


def test_an_unfinished_character_at_the_end_is_shown_as_one() -> None:
    def decode(ids: object) -> str:
        return bytes(ids).decode(errors="replace")  # pyright: ignore[reportArgumentType]

    assert split_text(decode, list("é".encode()[:1])) == ["\ufffd"]
    assert split_text(decode, []) == []


def test_a_model_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokens are not shown one by one: .*no such folder"):
        TokenText(tmp_path / "gone").pieces([1], ())
