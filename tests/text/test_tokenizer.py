from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from baton.proto.errors import CheckpointError, InputError
from baton.text.model_files import TOKENIZER_FILES
from baton.text.tokenizer import Tokenizer

DEMO_FOLDER = Path(__file__).parents[2] / "deploy" / "demo_model"

SAMPLES = ["Hello!", "Once there was a fox.", "été €5 😀\n\ttabs", "", "7 + 8", "日本語 text"]


def demo_files() -> dict[str, bytes]:
    paths = [DEMO_FOLDER / name for name in TOKENIZER_FILES]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


@pytest.mark.parametrize("text", SAMPLES)
def test_decode_inverts_encode(demo, text):
    ids = demo.encode(text)
    assert ids.dtype == np.int32
    assert demo.decode(ids) == text


@pytest.mark.parametrize("text", SAMPLES)
def test_sentencepiece_decode_inverts_encode(sentencepiece, text):
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_special_ids_of_the_demo_model(demo):
    assert demo.eos_token_ids == {0, 2}
    assert (demo.bos_token_id, demo.eos_token_id, demo.pad_token_id) == (0, 2, 0)
    assert demo.special_ids == {0, 1, 2}
    assert demo.vocab_size == 1024
    assert demo.decode([1, *demo.encode("fox"), 2]) == "fox"
    assert demo.decode([2], skip_special_tokens=False) == "<|im_end|>"


def test_special_tokens_may_be_objects(sentencepiece):
    assert sentencepiece.special_tokens["eos_token"] == "</s>"
    assert sentencepiece.eos_token_ids == {sentencepiece.token_id("</s>")}


def test_only_plain_prompts_get_what_the_tokenizer_adds(sentencepiece):
    bos, text = sentencepiece.bos_token_id, "the fox"
    assert sentencepiece.encode(text).tolist().count(bos) == 1
    assert bos not in sentencepiece.encode(text, add_special_tokens=False)
    chat = sentencepiece.encode_chat([{"role": "user", "content": text}])
    assert chat.tolist().count(bos) == 1


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (7, 5, {2, 7}),
        (1, 5, {1, 2}),
        (0, 5, {0, 2}),
        ([7, 8], 5, {2, 7, 8}),
        (None, 5, {2, 5}),
        (None, None, {2}),
    ],
)
def test_eos_ids_come_from_generation_config_then_config(generation, config, expected):
    files = demo_files()
    files["generation_config.json"] = json.dumps({"eos_token_id": generation}).encode()
    files["config.json"] = json.dumps({"eos_token_id": config}).encode()
    assert Tokenizer.from_files(files).eos_token_ids == expected


def test_older_special_tokens_map_fills_gaps():
    files = demo_files()
    files["tokenizer_config.json"] = b'{"eos_token": "<|im_end|>"}'
    files["special_tokens_map.json"] = b'{"eos_token": "no", "bos_token": "<|endoftext|>"}'
    tokens = Tokenizer.from_files(files).special_tokens
    assert tokens == {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}


def test_template_file_wins_over_the_config():
    files = demo_files()
    files["tokenizer_config.json"] = b'{"chat_template": "from config"}'
    message = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_files(files, trusted=True).render_chat(message) != "from config"
    del files["chat_template.jinja"]
    assert Tokenizer.from_files(files, trusted=True).render_chat(message) == "from config"


def test_missing_tokenizer_is_one_clear_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"model": {"type": "Unheard-of"}}'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("generation_config.json", b'{"eos_token_id": "two"}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_damaged_files_are_typed_errors(name, content):
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Tokenizer.from_files({**demo_files(), name: content})


def test_lone_surrogate_is_an_input_error(demo):
    with pytest.raises(InputError):
        demo.encode("\ud800")


def test_ids_outside_the_vocabulary_have_no_text(demo):
    assert demo.decode([5000, *demo.encode("fox")]) == "fox"
    assert demo.token_bytes(5000) == b""


def test_importing_text_loads_neither_library():
    code = (
        "import sys, baton.text, baton.text.tokenizer, baton.text.detokenizer;"
        "print(int('tokenizers' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"0"
