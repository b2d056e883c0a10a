"""A response ends with the first token after which its text holds a stop string, and no other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.data.tokenizer import TextTokenizer
from workers.engines.generation import windows
from workers.engines.generation.windows import StopSearch, text_to_stop

TEXT = "The answer is 12.</answer>\n\nQ: don't. Was ist 1+1? Größe 日本語 ✓ 😀 </answer> END END."
STOPS = ["</answer>", "\n\n", "Q:", "END", "日本", "😀", "ö", "is 1", "t.", " ", "the", "aaa", "12.</"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """As of GPT-2, Qwen and Llama 3: tokens are runs of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 4, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2, Mistral and Gemma: pieces of words, and single bytes for other characters."""
    letters = sorted(set(TEXT) - set(" 日😀") | set("abc▁"))
    pieces = ["▁</", "answer", ">", "▁END", "EN", "is", "▁the", "▁▁", "aa"]
    names = dict.fromkeys(["<unk>", *BYTES, *letters, *pieces])
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """As of BERT: words and their ends, with spaces before marks taken out."""
    marks = "< / answer > END Q : do n 't . ! ? is 1 12 the a ##a ##aa ##END t ##t"
    names = ["[UNK]", *marks.split(" ")]
    tokenizer = Tokenizer(models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return tokenizer


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "word-piece": word_piece}


@cache
def made(kind: str) -> TextTokenizer:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextTokenizer(tokenizer, {}, None, "")


@dataclass(frozen=True)
class Case:
    kind: str
    stops: tuple[str, ...]
    tokens: list[int]
    windows: list[int]

    def truth(self) -> int | None:
        """Decode every beginning of the response whole."""
        tokenizer = made(self.kind)
        texts = (tokenizer.decode(self.tokens[:end]) for end in range(1, len(self.tokens) + 1))
        return next((end for end, text in enumerate(texts, 1) if any(stop in text for stop in self.stops)), None)

    def found(self) -> int | None:
        """Go on in a new window, with a new search, after each of the ``windows``."""
        begin = 0
        sizes = iter([*self.windows, len(self.tokens)])
        while begin < len(self.tokens):
            window = self.tokens[begin : begin + next(sizes)]
            search = StopSearch(self.stops, made(self.kind), self.tokens[:begin])
            end = search.feed(window)
            if end is not None:
                assert search.num_tokens == end, "no token after the end is looked at"
                return begin + end
            assert search.num_tokens == len(window)
            begin += len(window)
        return None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Random tokens among which there are pieces of stop strings and of text, special and unknown
    tokens."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    tokenizer = made(kind)
    stops = draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True))
    likely = [tokenizer.encode(text, add_special_tokens=False) for text in (*stops, TEXT)]
    runs = st.one_of(
        st.sampled_from(likely).flatmap(
            lambda run: st.tuples(st.integers(0, len(run)), st.integers(0, len(run))).map(
                lambda ends: run[min(ends) : max(ends)]
            )
        ),
        st.lists(st.integers(0, tokenizer.num_tokens + 2), max_size=6),
        st.sampled_from([[token] * 40 for token in tokenizer.special_ids.values()]),
    )
    tokens = [token for run in draw(st.lists(runs, max_size=24)) for token in run]
    return Case(kind, tuple(stops), tokens, draw(st.lists(st.integers(1, 40), max_size=6)))


def case_of(kind: str, text: str, stop: str, *windows: int) -> Case:
    return Case(kind, (stop,), made(kind).encode(text, add_special_tokens=False), list(windows))


@pytest.mark.parametrize("least", [1, 32])
@given(case=cases())
@example(case_of("byte-level", "x" * 90 + "日本語", "日本", 91, 1, 1))
# one run of bytes, which is read whole or not at all; cut within a character it would stay broken
@example(case_of("byte-fallback", "日" + "😀" * 40 + "日本", "日本"))
@example(case_of("byte-fallback", "日" + "😀" * 40 + "日本", "日本", 33, 50, 33))
@example(case_of("word-piece", "do n't", "n't", 1, 1))
@settings(max_examples=250, deadline=None)
def test_the_end_is_where_the_whole_text_first_holds_a_stop_string(least: int, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_LEAST", least)
        assert case.found() == case.truth()


def test_a_long_response_costs_no_more_a_token_than_a_short_one() -> None:
    """Also one of special tokens, and one of broken characters."""
    tokenizer = made("byte-level")
    byte = tokenizer.encode("é", add_special_tokens=False)[0]
    for tokens in (tokenizer.encode(TEXT * 60)[:4000], [tokenizer.special_ids["<s>"]] * 4000, [byte] * 4000):
        search = StopSearch(("never",), tokenizer, [])
        assert search.feed(tokens) is None
        assert len(search._tail) <= 4 * windows._MOST_BROKEN


def test_the_text_that_is_judged_ends_with_the_stop_string() -> None:
    assert text_to_stop("a</b>\n", ("</b>", "\n\n")) == "a</b>"
    assert text_to_stop("xENDxQ:", ("Q:", "END")) == "xEND"
    assert text_to_stop("by a stop token", ("</b>",)) == "by a stop token"
    assert text_to_stop("no strings", ()) == "no strings"
