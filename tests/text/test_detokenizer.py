from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.detokenizer import IncrementalDetokenizer
from baton.text.tokenizer import Tokenizer

BYTE_TOKENS = range(3, 259)
TEXTS = [
    "the fox",
    " an owl  and\n",
    "été",
    "€",
    "😀😀",
    "日本語",
    "a",
    " ",
    "\t",
    "👩\u200d🚀 flags 🇩🇪",
]


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options: object) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    parts, start = [], 0
    for size in [*sizes, len(ids)]:
        parts.append(detokenizer.push(ids[start : start + size]).text)
        start += size
    return "".join(parts) + detokenizer.finish().text


def splits(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(0, 3) for _ in range(length)]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 1030), max_size=40), st.randoms(use_true_random=False))
def test_byte_level_equals_decoding_at_once_for_any_tokens(demo, ids, rng):
    sizes = splits(rng, len(ids))
    assert stream(demo, ids, sizes) == demo.decode(ids)
    shown = stream(demo, ids, sizes, skip_special_tokens=False)
    assert shown == demo.decode(ids, skip_special_tokens=False)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(TEXTS), max_size=12), st.randoms(use_true_random=False))
def test_sentencepiece_equals_decoding_at_once_for_any_text(sentencepiece, texts, rng):
    ids = [2, *sentencepiece.encode("".join(texts)).tolist(), 2]
    assert stream(sentencepiece, ids, splits(rng, len(ids))) == sentencepiece.decode(ids)


@settings(max_examples=300)
@given(st.lists(st.integers(3, 400), max_size=60), st.randoms(use_true_random=False))
def test_sentencepiece_words_and_lone_bytes_equal_decoding_at_once(sentencepiece, ids, rng):
    """Any tokens, without two byte tokens in a row: the decoder joins these."""
    kept: list[int] = []
    for token in ids:
        follows_byte = bool(kept) and kept[-1] in BYTE_TOKENS
        if token < sentencepiece.vocab_size and not (follows_byte and token in BYTE_TOKENS):
            kept.append(token)
    assert stream(sentencepiece, kept, splits(rng, len(kept))) == sentencepiece.decode(kept)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 300), max_size=60), st.randoms(use_true_random=False))
def test_sentencepiece_text_does_not_depend_on_the_division(sentencepiece, ids, rng):
    whole = stream(sentencepiece, ids, [])
    assert stream(sentencepiece, ids, splits(rng, len(ids))) == whole


def test_an_unfinished_character_is_held_back(demo, sentencepiece):
    for tokenizer in (demo, sentencepiece):
        detokenizer = IncrementalDetokenizer(tokenizer)
        ids = tokenizer.encode("x😀").tolist()
        texts = [detokenizer.push([token]).text for token in ids]
        assert "".join(texts) == "x😀"
        assert texts[-1] == "😀"
        stray = detokenizer.push(ids[-2:-1]).text + detokenizer.finish().text
        assert stray == "\ufffd"


def test_the_window_stays_short(sentencepiece):
    detokenizer = IncrementalDetokenizer(sentencepiece)
    longest = 0
    for token in sentencepiece.encode("the fox and the owl " * 100).tolist():
        detokenizer.push([token])
        longest = max(longest, len(detokenizer._decoder._window))
    assert longest <= 17
    for _ in range(100):
        detokenizer.push([3 + 0xFF])
        longest = max(longest, len(detokenizer._decoder._window))
    assert longest <= 20


@pytest.mark.parametrize("stop", ["fox ate", "x a", " the", "hen."])
def test_stop_string_over_token_borders(demo, sentencepiece, stop):
    text = "a fox ate the hen. And more"
    for tokenizer in (demo, sentencepiece):
        detokenizer = IncrementalDetokenizer(tokenizer, [stop, "never"])
        ids, out, used = tokenizer.encode(text).tolist(), "", 0
        for start in range(0, len(ids), 2):
            delta = detokenizer.push(ids[start : start + 2])
            out, used = out + delta.text, used + delta.num_tokens
            if delta.stopped:
                break
        assert out == text[: text.index(stop)]
        assert delta.stop == stop
        assert stop in tokenizer.decode(ids[:used])
        assert stop not in tokenizer.decode(ids[: used - 1])
        assert detokenizer.push(ids).num_tokens == 0
        assert detokenizer.finish().text == ""


def test_stop_string_may_stay(demo):
    ids = demo.encode("one two three").tolist()
    detokenizer = IncrementalDetokenizer(demo, ["two"], include_stop=True)
    assert detokenizer.push(ids).text == "one two"
