"""Makes tokenizer.json, and the settings beside it, from a GGUF file's metadata.

Two kinds exist. ``gpt2`` is byte-level BPE with merges; ``tokenizer.ggml.pre`` names the regular
expression that splits texts. ``llama`` is SentencePiece: pieces with scores. Merging the pair with
the highest score, as SentencePiece does, is BPE with the pairs in the order of the scores.
"""

from __future__ import annotations

from typing import Any

from baton.proto.errors import CheckpointError
from baton.text.plain_tokenizers import GPT_2, GPT_4O, LLAMA_3, QWEN, TEKKEN

from .gguf import Metadata

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_SPACE = "\u2581"
_SPLIT = {
    "llama-bpe": LLAMA_3, "llama3": LLAMA_3, "llama-v3": LLAMA_3, "dbrx": LLAMA_3,
    "qwen2": QWEN, "deepseek-r1-qwen": QWEN,
    "tekken": TEKKEN,
    "gpt-4o": GPT_4O,
    "gpt-2": GPT_2,
    "smollm": GPT_2,
}  # fmt: skip
"""Regular expression by ``tokenizer.ggml.pre``."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Here a word that is a token becomes this token, whatever the merges would make of it."""
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Here texts are first brought into Unicode's form NFC, as the models' own tokenizers do."""
_WITH_BEGIN = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Here a prompt begins with the BOS token unless the file states otherwise."""
_TEMPLATE = "tokenizer.chat_template"


def tokenizer_files(metadata: Metadata) -> dict[str, Any]:
    """Return the objects and texts of the files that a tokenizer needs, by name.

    Raises CheckpointError for an unsupported or inconsistent vocabulary.
    """
    kind = metadata.text(f"{_KEY}model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{metadata.path}: unsupported {_KEY}model '{kind}'; supported are gpt2 and llama"
        )
    vocabulary = _Vocabulary(metadata)
    made = _byte_level(metadata, vocabulary) if kind == "gpt2" else _pieces(metadata, vocabulary)
    begins = kind == "llama" or metadata.text(f"{_KEY}pre", "") in _WITH_BEGIN
    made |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "post_processor": _ends(metadata, vocabulary, begins=begins),
    }
    files = {"tokenizer.json": made, "tokenizer_config.json": _settings(metadata, vocabulary)}
    return files | _templates(metadata)


class _Vocabulary:
    """Texts and types of all tokens."""

    def __init__(self, metadata: Metadata) -> None:
        self.texts = metadata.texts(f"{_KEY}tokens")
        key = f"{_KEY}token_type"
        self.kinds = [_NORMAL] * len(self.texts)
        if key in metadata:
            self.kinds = [int(kind) for kind in metadata.numbers(key).tolist()]
        if len(self.kinds) != len(self.texts):
            raise CheckpointError(
                f"{metadata.path}: {len(self.texts)} tokens have {len(self.kinds)} types"
            )
        used = [i for i, kind in enumerate(self.kinds) if kind != _UNUSED]
        self.used = used[-1] + 1 if used else 0
        self.ids = {text: i for i, text in enumerate(self.texts[: self.used])}
        if len(self.ids) != self.used:
            raise CheckpointError(f"{metadata.path}: two tokens have the same text")

    def added(self) -> list[dict[str, Any]]:
        """Return the tokens that are found in a text before the rest is split."""
        return [
            {
                "id": index,
                "content": self.texts[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.kinds[index] != _USER_DEFINED,
            }
            for index in range(self.used)
            if self.kinds[index] in _ADDED and self.texts[index]
        ]

    def text_of(self, metadata: Metadata, name: str) -> str | None:
        """Return the text of a named token such as ``bos``; None if the file names none."""
        key = f"{_KEY}{name}_token_id"
        if key not in metadata:
            return None
        index = metadata.integer(key)
        if not 0 <= index < len(self.texts):
            raise CheckpointError(
                f"{metadata.path}: {key} {index} is outside the vocabulary of {len(self.texts)}"
            )
        return self.texts[index]


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    pre = metadata.text(f"{_KEY}pre", "default")
    if pre not in _SPLIT:
        raise CheckpointError(
            f"{metadata.path}: unsupported {_KEY}pre '{pre}'; supported are {', '.join(_SPLIT)}"
        )
    merges = [merge.split(" ") for merge in metadata.texts(f"{_KEY}merges")]
    ids = vocabulary.ids
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
            raise CheckpointError(f"{metadata.path}: {_KEY}merges: {pair} is not a pair of tokens")
    split = {"type": "Split", "pattern": {"Regex": _SPLIT[pre]}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps = [split | {"invert": False}, level | {"use_regex": False}]
    if pre == "smollm":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS,
            "vocab": ids,
            "merges": merges,
        },
    }


def _pieces(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = [float(score) for score in metadata.numbers(f"{_KEY}scores").tolist()]
    if len(scores) != len(vocabulary.texts):
        raise CheckpointError(
            f"{metadata.path}: {len(vocabulary.texts)} tokens have {len(scores)} scores"
        )
    prefixed = metadata.flag(f"{_KEY}add_space_prefix", default=True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizers: list[dict[str, Any]] = [spaces]
    if prefixed:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.text_of(metadata, "unknown"),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": _merges(vocabulary, scores),
        },
    }


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that join to a piece, the highest score first.

    Pairs of one piece are in the order of their parts' ids, as in converted SentencePiece models.
    """
    ids = vocabulary.ids
    found: list[tuple[float, int, int, int, str, str]] = []
    for text, index in ids.items():
        if vocabulary.kinds[index] in (_CONTROL, _UNKNOWN, _BYTE):
            continue
        score = -scores[index]
        for at in range(1, len(text)):
            left, right = ids.get(text[:at]), ids.get(text[at:])
            if left is not None and right is not None:
                found.append((score, index, left, right, text[:at], text[at:]))
    found.sort()
    return [pair[4:] for pair in found]


def _ends(metadata: Metadata, vocabulary: _Vocabulary, *, begins: bool) -> dict[str, Any] | None:
    """Return the post-processor that adds BOS and EOS, or None if the model has neither."""
    first = metadata.flag(f"{_KEY}add_bos_token", default=begins)
    last = metadata.flag(f"{_KEY}add_eos_token", default=False)
    bos = vocabulary.text_of(metadata, "bos") if first else None
    eos = vocabulary.text_of(metadata, "eos") if last else None
    named = [text for text in (bos, eos) if text is not None]
    if not named:
        return None
    before = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos is not None else []
    after = [{"SpecialToken": {"id": eos, "type_id": 0}}] if eos is not None else []
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    second = [*before, {"Sequence": {"id": "B", "type_id": 1}}, *after]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]} for text in named
        },
    }


def _settings(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    texts = {f"{own}_token": vocabulary.text_of(metadata, name) for name, own in names.items()}
    return {key: text for key, text in texts.items() if text}


def _templates(metadata: Metadata) -> dict[str, str]:
    files = {}
    if _TEMPLATE in metadata:
        files["chat_template.jinja"] = metadata.text(_TEMPLATE)
    if f"{_TEMPLATE}.tool_use" in metadata:
        files["additional_chat_templates/tool_use.jinja"] = metadata.text(f"{_TEMPLATE}.tool_use")
    return files
