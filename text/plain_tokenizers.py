"""Decides which tokenizer files are plain: their time and memory depend on the text alone.

A ``tokenizer.json`` is almost a program. A regular expression can take exponential time, a chain
of replacements can turn one word into gigabytes, and some parts make the library panic. Files
built only from the parts below cannot do that. Nearly all models have such files, and those are
used in this process. All other files run in a separate process (:mod:`.guarded`), which
costs a message per call (docs/decisions/0024-untrusted-tokenizers-run-in-a-helper-process.md).

Vocabulary and merges need no check: their cost is bounded by the file's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

MAX_GROWTH = 32
"""Limit of the factor by which all replacements together may lengthen a text."""
MAX_WORD_CHARS = 200
"""Limit of a word's length: WordPiece tries every part of a word, so its time is quadratic."""
MAX_PIECES = 16
MAX_DEPTH = 4
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = _WORDS + r"|\p{N}{1,3}" + _REST
QWEN = _WORDS + r"|\p{N}" + _REST
TEKKEN = (
    f"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O = (
    f"{_START}{_UPPER}*{_LOWER}+{_SUFFIX}|{_START}{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = r"\p{N}{1,3}"
CHINESE_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The last of three expressions, after those of digits and of Chinese characters."""
CLIP = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
CLIP_WITH_ENDS = r"<\|startoftext\|>|<\|endoftext\|>|" + CLIP
SPACES = r"\s+"
KNOWN_PATTERNS = frozenset(
    (
        GPT_2, LLAMA_3, QWEN, QWEN_3_5, TEKKEN, GPT_4O, DIGITS, CHINESE_AND_KANA, DEEPSEEK_V3,
        CLIP, CLIP_WITH_ENDS, SPACES,
    )
)  # fmt: skip
"""Regular expressions of widespread models, known not to take exponential time."""

_NORMALIZERS = {
    "BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip",
    "ByteLevel",
}  # fmt: skip
_PRE_TOKENIZERS = {
    "ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation",
    "UnicodeScripts", "CharDelimiterSplit",
}  # fmt: skip
_DECODERS = {"ByteLevel", "WordPiece", "ByteFallback", "Fuse", "Strip"}
_PROCESSORS = {"ByteLevel", "BertProcessing", "RobertaProcessing"}


class _Model(msgspec.Struct):
    """The checked fields of the model; vocabulary and merges are skipped."""

    type: str = ""
    dropout: float | None = None
    max_input_chars_per_word: int = 100


class _File(msgspec.Struct):
    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def is_plain(content: bytes) -> bool:
    """True if a ``tokenizer.json`` consists of known parts only; False if it cannot be read."""
    try:
        file = msgspec.json.decode(content, type=_File)
        return (
            _is_plain_model(file.model)
            and _growth(file.normalizer, _normalizer, "normalizers") <= MAX_GROWTH
            and _growth(file.pre_tokenizer, _pre_tokenizer, "pretokenizers") <= MAX_GROWTH
            and _growth(file.decoder, _decoder, "decoders") <= MAX_GROWTH
            and _growth(file.post_processor, _processor, "processors") <= MAX_GROWTH
        )
    except _UNREADABLE:
        return False


_UNREADABLE = (
    msgspec.MsgspecError, RecursionError, UnicodeDecodeError, KeyError, TypeError, AttributeError,
)  # fmt: skip
_Part = dict[str, Any]
_NEVER = float("inf")


def _growth(
    part: _Part | None, of: Callable[[_Part], float], children: str, depth: int = 0
) -> float:
    """Return the factor by which a part can lengthen a text; infinite for an unknown part."""
    if part is None:
        return 1.0
    if part["type"] != "Sequence":
        return of(part)
    if depth >= MAX_DEPTH or len(part[children]) > MAX_PIECES:
        return _NEVER
    growth = 1.0
    for child in part[children]:
        growth *= _growth(child, of, children, depth + 1)
    return growth


def _is_plain_model(model: _Model) -> bool:
    if model.type == "WordPiece":
        return model.max_input_chars_per_word <= MAX_WORD_CHARS
    return model.type in ("BPE", "WordLevel") and not model.dropout


def _normalizer(part: _Part) -> float:
    match part["type"]:
        case "Prepend":
            return 1.0 if len(part["prepend"]) <= MAX_PIECES else _NEVER
        case "Replace":
            return _replaced(part)
        case kind:
            return 1.0 if kind in _NORMALIZERS else _NEVER


def _pre_tokenizer(part: _Part) -> float:
    match part["type"]:
        case "Split":
            return 1.0 if _is_plain_pattern(part["pattern"]) else _NEVER
        case "Metaspace":
            return 1.0 if len(part["replacement"]) == 1 else _NEVER
        case kind:
            return 1.0 if kind in _PRE_TOKENIZERS else _NEVER


def _decoder(part: _Part) -> float:
    match part["type"]:
        case "Replace":
            return _replaced(part)
        case "Metaspace":
            return 1.0 if len(part["replacement"]) == 1 else _NEVER
        case kind:
            return 1.0 if kind in _DECODERS else _NEVER


def _processor(part: _Part) -> float:
    if part["type"] != "TemplateProcessing":
        return 1.0 if part["type"] in _PROCESSORS else _NEVER
    texts = sum("Sequence" in piece for piece in part["single"])
    added = sum(len(token["ids"]) for token in part["special_tokens"].values())
    small = len(part["single"]) <= MAX_PIECES and added <= MAX_PIECES * MAX_PIECES
    return float(texts) if small else _NEVER


def _replaced(part: _Part) -> float:
    pattern = part["pattern"].get("String", "")
    if part["pattern"].get("Regex") == SPACES:
        return max(1.0, float(len(part["content"])))
    return max(1.0, len(part["content"]) / len(pattern)) if pattern else _NEVER


def _is_plain_pattern(pattern: _Part) -> bool:
    return bool(pattern.get("String")) or pattern.get("Regex") in KNOWN_PATTERNS
