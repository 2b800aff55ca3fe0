"""Prompts of picture models: both tokenizers, from files as a router sends them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from baton.deploy.config import ServeSettings
from baton.deploy.plan.prepare import check_tokenizer
from baton.proto.errors import CheckpointError, InputError
from baton.router.describe import read_text_files
from baton.text.flux_prompts import FluxTokenizer, flux_defaults
from baton.text.model_files import PICTURE_FILES, read_files
from baton.text.plain_tokenizers import is_plain
from baton.text.prompt_tokens import MAX_PROMPT_CHARS

FOLDER = Path(__file__).parents[1] / "data" / "pictures" / "flux"
REFERENCE = np.load(FOLDER / "reference.npz")


@pytest.fixture(scope="module")
def files():
    return read_text_files(str(FOLDER), 1 << 24)


@pytest.fixture(scope="module")
def tokenizer(files):
    """As a client has it, which does not trust the files."""
    tokenizer = FluxTokenizer(files, (77, 24))
    yield tokenizer
    tokenizer.close()


def older(files):
    """The files of an older model: CLIP's vocabulary and merges instead of tokenizer.json."""
    changed = dict(files)
    model = json.loads(changed.pop("tokenizer/tokenizer.json"))["model"]
    changed["tokenizer/vocab.json"] = json.dumps(model["vocab"]).encode()
    merges = [" ".join(pair) for pair in model["merges"]]
    changed["tokenizer/merges.txt"] = "\n".join(["#version: 0.2", *merges]).encode()
    return changed


def test_the_router_sends_what_a_prompt_needs(files):
    assert files == read_files(FOLDER, PICTURE_FILES)
    assert "tokenizer_2/tokenizer.json" in files


def test_prompts_are_tokenized_as_by_transformers(tokenizer):
    found = tokenizer.encode(REFERENCE["text"].tobytes().decode())
    assert found.tokens.tolist() == REFERENCE["text_clip"].tolist()
    expected = REFERENCE["text_t5"].tolist()
    cut = expected if len(expected) <= 24 else [*expected[:23], expected[-1]]
    assert found.tokens_2.tolist() == [*cut, *[0] * (24 - len(cut))]


def test_an_older_clip_tokenizer_gives_the_same_tokens(tokenizer, files):
    found = FluxTokenizer(older(files), (77, 24))
    for prompt in ("The cat's mat, 42!", "", "  A\tRED   house  ", "ünknown", "<|endoftext|> on"):
        assert found.encode(prompt).tokens.tolist() == tokenizer.encode(prompt).tokens.tolist()
    found.close()


def test_clip_is_tokenized_in_this_process(files):
    assert is_plain(files["tokenizer/tokenizer.json"])


def test_long_prompts_are_cut_and_keep_their_end(tokenizer):
    found = tokenizer.encode("cat " * 500)
    assert len(found.tokens) == 77
    assert (found.tokens[0], found.tokens[-1]) == (98, 99)
    assert len(found.tokens_2) == 24
    assert found.tokens_2[-1] == 1
    with pytest.raises(InputError, match="prompt too long"):
        tokenizer.encode("a" * (MAX_PROMPT_CHARS + 1))


@pytest.mark.parametrize("missing", ["tokenizer/vocab.json", "tokenizer/merges.txt"])
def test_a_missing_file_is_named(files, missing):
    changed = older(files)
    del changed[missing]
    with pytest.raises(CheckpointError, match="neither"):
        FluxTokenizer(changed)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer/vocab.json", b"[]", "vocab.json must hold an object"),
        ("tokenizer/vocab.json", b'{"a": 0}', "is missing"),
        ("tokenizer/merges.txt", b"\xff", "merges.txt cannot be read"),
        ("tokenizer_2/tokenizer.json", b"{", "tokenizer_2"),
    ],
)
def test_malformed_files_are_checkpoint_errors(files, name, content, said):
    with pytest.raises(CheckpointError, match=said):
        FluxTokenizer({**older(files), name: content})


def test_a_damaged_tokenizer_is_found_before_any_process_starts(tmp_path):
    folder = tmp_path / "flux"
    for name in PICTURE_FILES:
        if (FOLDER / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(FOLDER / name, folder / name)
    check_tokenizer(ServeSettings(model=str(folder)))
    (folder / "tokenizer_2" / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"flux/tokenizer_2: tokenizer\.json cannot be read"):
        check_tokenizer(ServeSettings(model=str(folder)))


class TestDefaults:
    def test_dev_has_guidance_and_many_steps(self, files):
        found = flux_defaults(files, "m")
        assert (found.takes_guidance, found.steps, found.guidance) == (True, 28, 3.5)
        assert found.lengths == (77, 512)

    def test_schnell_has_few_steps(self, files):
        config = json.loads(files["transformer/config.json"]) | {"guidance_embeds": False}
        changed = {**files, "transformer/config.json": json.dumps(config).encode()}
        found = flux_defaults(changed, "m")
        assert (found.takes_guidance, found.steps, found.guidance) == (False, 4, 0.0)
        assert found.lengths == (77, 256)

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("transformer/config.json", b'{"guidance_embeds": 1}', "guidance_embeds"),
            ("transformer/config.json", b"{", "not JSON"),
            ("text_encoder/config.json", b'{"max_position_embeddings": 9999}', "max_position"),
            ("text_encoder/config.json", b'{"max_position_embeddings": true}', "max_position"),
        ],
    )
    def test_wrong_configs(self, files, name, content, said):
        with pytest.raises(CheckpointError, match=said):
            flux_defaults({**files, name: content}, "m")
