from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers

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


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
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


PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
SPELLING = {byte: chr(byte) for byte in PRINTABLE}
SPELLING |= {byte: chr(256 + index) for index, byte in enumerate(OTHERS)}
JAPANESE = "のテキスト、のメリット"
BYTE_LEVEL_DECODERS = {
    "alone": decoders.ByteLevel(),
    "in a sequence": decoders.Sequence([decoders.ByteLevel()]),
    "before a fuse": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    "after a replacement": decoders.Sequence([decoders.Replace("no", "no"), decoders.ByteLevel()]),
}


def bytes_across_characters(decoder: decoders.Decoder) -> Tokenizer:
    """A tokenizer whose tokens end one Japanese character and begin the next."""
    vocab = {char: index for index, char in enumerate(SPELLING.values())}
    merges = []
    raw = "".join(SPELLING[byte] for byte in JAPANESE.encode())
    for start in range(2, len(raw) - 3, 3):
        for left, right in (
            (raw[start + 1], raw[start + 2]),
            (raw[start], raw[start + 1 : start + 3]),
        ):
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
    core = Core(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoder
    return Tokenizer.from_files({"tokenizer.json": core.to_str().encode()}, trusted=True)


@pytest.mark.parametrize("name", BYTE_LEVEL_DECODERS)
def test_tokens_across_characters_stream_their_text(name):
    tokenizer = bytes_across_characters(BYTE_LEVEL_DECODERS[name])
    ids = tokenizer.encode(JAPANESE * 5).tolist()
    assert len(ids) < len(JAPANESE.encode() * 5) / 2
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.push([token]).text for token in ids]
    assert "".join(deltas) + detokenizer.finish().text == JAPANESE * 5
    shown = sum(map(bool, deltas))
    assert shown == len(JAPANESE * 5)  # each token shows the character that it ends
    assert tokenizer.is_byte_level is (name != "after a replacement")


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
