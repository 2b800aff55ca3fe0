"""SentencePiece vocabularies of GGUF files: the library finds the pieces that llama.cpp finds."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest

from baton.engine.loading.gguf import GgufFile
from baton.engine.loading.gguf_tokenizer import tokenizer_files
from baton.proto.errors import CheckpointError
from baton.text.plain_tokenizers import KNOWN_PATTERNS, is_plain
from baton.text.tokenizer import Tokenizer

from .gguf_cases import gguf, write
from .gguf_models import demo_tokenizer

SPACE = "\u2581"
UNKNOWN, CONTROL, USER, BYTE = 2, 3, 4, 6
LETTERS = "abcde" + SPACE + "é\n"


def vocabulary(seed: int) -> tuple[list[str], list[float], list[int]]:
    """Texts, scores and types of a vocabulary in which most pairs of frequent pieces join."""
    draw = random.Random(seed)
    texts = ["<unk>", "<s>", "</s>", "<|user|>", "\t\t"]
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER]
    texts += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [BYTE] * 256
    pieces = [*LETTERS]
    while len(pieces) < 120:
        joined = draw.choice(pieces) + draw.choice(pieces)
        if joined not in pieces and len(joined) <= 6:
            pieces.append(joined)
    scores = [0.0] * len(texts) + [-float(i) for i in range(len(pieces))]
    return texts + pieces, scores, kinds + [1] * len(pieces)


def keys(seed: int, **changes) -> dict[str, object]:
    texts, scores, kinds = vocabulary(seed)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def load(tmp_path, metadata) -> Tokenizer:
    files = tokenizer_files(GgufFile(write(tmp_path, gguf(metadata, {}))).metadata)
    contents = {
        name: (made if isinstance(made, str) else json.dumps(made)).encode()
        for name, made in files.items()
    }
    assert is_plain(contents["tokenizer.json"])
    return Tokenizer.from_files(contents, trusted=True)


def pieces_of(text: str, texts: list[str], scores: list[float]) -> list[int]:
    """Join the pair with the highest score, the first of equal ones, until no pair joins."""
    ids = {piece: index for index, piece in enumerate(texts)}
    parts = [*text]
    while True:
        pairs = [
            (-scores[ids[left + right]], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in ids
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    out: list[int] = []
    for part in parts:
        spelled = [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        out += [ids[part]] if part in ids else spelled
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_those_of_the_highest_scores(tmp_path, seed, prefix):
    texts, scores, _ = vocabulary(seed)
    made = load(tmp_path, keys(seed, **{"tokenizer.ggml.add_space_prefix": prefix}))
    draw = random.Random(seed)
    for _ in range(150):
        text = "".join(draw.choice([*LETTERS, " ", "ö", "😀"]) for _ in range(draw.randint(1, 40)))
        spelled = (SPACE if prefix else "") + text.replace(" ", SPACE)
        assert made.encode(text).tolist() == [1, *pieces_of(spelled, texts, scores)]
        plain = text.replace(SPACE, " ")
        assert made.decode(made.encode(plain)) == plain


def test_added_tokens_are_found_first(tmp_path):
    made = load(tmp_path, keys(0, **{"tokenizer.ggml.add_space_prefix": False}))
    ids = made.encode("\t\t<|user|></s>", add_special_tokens=False).tolist()
    assert ids == [4, 3, 2]
    assert made.special_ids == {0, 1, 2, 3}
    assert made.decode(ids, skip_special_tokens=True) == "\t\t"
    assert made.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_the_file_decides_which_tokens_surround_a_prompt(tmp_path):
    for bos, eos in ((True, True), (False, True), (False, False)):
        changes = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        ids = load(tmp_path, keys(0, **changes)).encode("a").tolist()
        assert (ids[0] == 1, ids[-1] == 2) == (bos, eos)


def test_unequal_numbers_of_scores_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="381 tokens have 2 scores"):
        load(tmp_path, keys(0, **{"tokenizer.ggml.scores": [0.5, 1.5]}))


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("gpt-2", "it's 1234 a", ["it", "'s", "Ġ1234", "Ġa"]),
        ("llama-bpe", "IT'S 1234 a", ["IT", "'S", "Ġ", "123", "4", "Ġa"]),
        ("qwen2", "it's 123 a", ["it", "'s", "Ġ", "1", "2", "3", "Ġa"]),
        ("smollm", "it's 12a", ["it", "'s", "Ġ", "1", "2", "a"]),
        ("tekken", "aBc 12/\n", ["a", "Bc", "Ġ", "1", "2", "/Ċ"]),
        ("gpt-4o", "it's 1234", ["it's", "Ġ", "123", "4"]),
    ],
)
def test_texts_are_split_as_the_model_was_trained(tmp_path, pre, text, parts):
    import tokenizers

    metadata = demo_tokenizer() | {"tokenizer.ggml.pre": pre}
    files = tokenizer_files(GgufFile(write(tmp_path, gguf(metadata, {}))).metadata)
    core = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert [part for part, _ in core.pre_tokenizer.pre_tokenize_str(text)] == parts
    patterns = [
        step["pattern"]["Regex"]
        for step in files["tokenizer.json"]["pre_tokenizer"]["pretokenizers"]
        if step["type"] == "Split"
    ]
    assert set(patterns) <= KNOWN_PATTERNS
    assert np.all(np.array(core.encode(text).ids) >= 0)
