"""Untrusted tokenizer files: whatever they do, one typed error in bounded time."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, pre_tokenizers

from baton.proto.errors import CheckpointError, InputError
from baton.text import tokenizer as module
from baton.text.guarded import GuardedTokenizer
from baton.text.plain_tokenizers import KNOWN_PATTERNS, LLAMA_3, QWEN, is_plain
from baton.text.tokenizer import Tokenizer
from baton.text.tokenizer_core import LocalCore, TokenizerFailed

from .conftest import DEMO_FOLDER

DEMO = (DEMO_FOLDER / "tokenizer.json").read_text()
GROWING = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000} for _ in range(4)
    ],
}
BACKTRACKING = {
    "type": "Split", "behavior": "Isolated", "invert": False,
    "pattern": {"Regex": r"^(([a-z])+.)+[A-Z]([a-z])+$"},
}  # fmt: skip
REPEATED = {
    "type": "TemplateProcessing", "special_tokens": {},
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
}  # fmt: skip
PANICS = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def changed(**parts: object) -> str:
    return json.dumps(json.loads(DEMO) | parts)


def split(*patterns: str) -> dict[str, object]:
    steps: list[dict[str, object]] = [
        {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": pattern}}
        for pattern in patterns
    ]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, {**bytes_only, "trim_offsets": True}]}


O200K = (  # as the files of gpt-oss and GPT-4o have it
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (  # as DeepSeek-V3's file has them
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


@pytest.mark.parametrize(
    ("parts", "plain"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, True),
        ({"pre_tokenizer": split(LLAMA_3)}, True),
        ({"pre_tokenizer": split(QWEN)}, True),
        ({"pre_tokenizer": split(O200K)}, True),
        ({"pre_tokenizer": split(*DEEPSEEK)}, True),
        ({"normalizer": GROWING}, False),
        ({"pre_tokenizer": BACKTRACKING}, False),
        ({"post_processor": {"type": "Sequence", "processors": [REPEATED, REPEATED]}}, False),
        ({"normalizer": PANICS}, False),
        ({"normalizer": {"type": "Unheard"}}, False),
        ({"decoder": [1]}, False),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}}, False),
    ],
    ids=str,
)
def test_only_known_parts_run_in_this_process(parts, plain):
    assert is_plain(changed(**parts).encode()) is plain


@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS))
def test_known_expressions_take_time_in_proportion_to_the_text(pattern):
    """Exponential time would exceed a test's limit, quadratic time would show in the slowest."""
    splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    for unit in ("a", "A", "aA", " ", "\n", " \n", "'", "'S", "1", "\u6f22", "\u0301", "!", "!a"):
        for last in ("", "!", "a", "\0"):
            text = unit * (20_000 // len(unit)) + last
            pieces = splitter.pre_tokenize_str(text)
            assert sum(end - start for _, (start, end) in pieces) == len(text)


def test_plain_models_stay_in_this_process(monkeypatch):
    monkeypatch.setattr(module, "GuardedTokenizer", None)
    tokenizer = Tokenizer.from_files({"tokenizer.json": DEMO.encode()})
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"


def test_another_process_gives_the_same_tokens_and_texts():
    local, guarded = LocalCore(DEMO), GuardedTokenizer(DEMO)
    try:
        assert guarded.vocab_size == local.vocab_size
        assert guarded.added_tokens == local.added_tokens
        assert guarded.is_byte_level == local.is_byte_level
        for text in ("", "Once upon a time", "äöü 漢字 \U0001f600", "a" * 10_000):
            ids = local.encode(text, add_special_tokens=True)
            assert guarded.encode(text, add_special_tokens=True) == ids
            decoded = local.decode(ids, skip_special_tokens=True)
            assert guarded.decode(ids, skip_special_tokens=True) == decoded
        assert guarded.id_to_token(300) == local.id_to_token(300)
        assert guarded.token_to_id("a") == local.token_to_id("a")
        with pytest.raises(UnicodeEncodeError):
            guarded.encode("\ud800", add_special_tokens=True)
    finally:
        guarded.close()


@pytest.mark.parametrize(
    ("parts", "text"),
    [({"normalizer": GROWING}, "aaa"), ({"pre_tokenizer": BACKTRACKING}, "a" * 60 + "b")],
    ids=["memory", "time"],
)
def test_a_text_that_overruns_fails_and_the_next_one_is_served(parts, text):
    guarded = GuardedTokenizer(changed(**parts), timeout=20.0, cpu_seconds=1)
    try:
        with pytest.raises(TokenizerFailed, match="the tokenizer"):
            guarded.encode(text, add_special_tokens=False)
        assert guarded.encode("b", add_special_tokens=False)
    finally:
        guarded.close()


@pytest.mark.parametrize("trusted", [True, False])
def test_a_panic_of_the_library_is_one_error(trusted):
    files = {"tokenizer.json": changed(normalizer=PANICS).encode()}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_files(files, trusted=trusted)


def test_users_see_an_input_error(monkeypatch):
    monkeypatch.setattr(
        module,
        "GuardedTokenizer",
        lambda text, **more: GuardedTokenizer(text, cpu_seconds=1, **more),
    )
    tokenizer = Tokenizer.from_files({"tokenizer.json": changed(normalizer=GROWING).encode()})
    try:
        with pytest.raises(InputError, match="cannot be tokenized"):
            tokenizer.encode("aaa")
    finally:
        tokenizer.close()
