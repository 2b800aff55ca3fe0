from __future__ import annotations

import json
import re
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


def test_the_older_special_tokens_map_counts_without_added_tokens_decoder():
    files = demo_files()
    files["tokenizer_config.json"] = b'{"eos_token": "<|im_start|>"}'
    files["special_tokens_map.json"] = b'{"eos_token": {"content": "<|im_end|>"}}'
    assert Tokenizer.from_files(files).special_tokens == {"eos_token": "<|im_end|>"}
    files["tokenizer_config.json"] = b'{"eos_token": "<|im_start|>", "added_tokens_decoder": {}}'
    assert Tokenizer.from_files(files).special_tokens == {"eos_token": "<|im_start|>"}


def added(content: str, **flags: bool) -> dict[str, object]:
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": True, **usual, **flags}


STATED = {
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"1025": added("<y>"), "1024": added("<x>")}
        }
    },
    "added_tokens.json": {"added_tokens.json": {"<y>": 1025, "<x>": 1024}},
    "named": {"tokenizer_config.json": {"bos_token": "<x>", "image_token": "<y>"}},
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["<x>", "<y>"]}},
    "additional": {"tokenizer_config.json": {"additional_special_tokens": ["<x>", "<y>"]}},
    "special_tokens_map.json": {
        "special_tokens_map.json": {"pad_token": "<x>", "additional_special_tokens": ["<y>"]}
    },
}


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("where", STATED)
def test_tokens_that_other_files_state_are_added(where, trusted, monkeypatch):
    if not trusted:
        monkeypatch.setattr("baton.text.tokenizer.is_plain", lambda _: False)
    files = demo_files()
    files |= {name: json.dumps(content).encode() for name, content in STATED[where].items()}
    tokenizer = Tokenizer.from_files(files, trusted=trusted)
    try:
        ids = tokenizer.encode("a<x><y>b").tolist()
        assert ids == [*tokenizer.encode("a"), 1024, 1025, *tokenizer.encode("b")]
        assert tokenizer.vocab_size == 1026
        assert tokenizer.decode([1024, 1025], skip_special_tokens=False) == "<x><y>"
    finally:
        tokenizer.close()


def test_flags_of_added_tokens_decoder_count():
    files = demo_files()
    decoder = {"1024": added("<x>", lstrip=True, special=False)}
    files["tokenizer_config.json"] = json.dumps({"added_tokens_decoder": decoder}).encode()
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.encode("a <x>").tolist() == [*tokenizer.encode("a"), 1024]
    assert 1024 not in tokenizer.special_ids


MANY = [f"<{number}>" for number in range(20_000)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", {"<x>": 1030}, "'<x>' has id 1024"),
        ("added_tokens.json", {"<|im_end|>": 7}, "'<|im_end|>' has id 2"),
        ("added_tokens.json", {"<x>": "1024"}, "'<x>' is no number"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": added("<x>")}}, "9 by added_"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": "<x>"}}, "bad token 9"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"-": added("<x>")}}, "bad token -"),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<x>"]}, "must be an object"),
        ("tokenizer_config.json", {"extra_special_tokens": MANY}, "limit is 16384"),
    ],
)  # fmt: skip
def test_files_that_contradict_each_other_are_refused(name, content, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Tokenizer.from_files({**demo_files(), name: json.dumps(content).encode()})


@pytest.mark.parametrize("key", ["image_token_id", "image_token_index"])
def test_the_placeholder_of_images_is_that_of_the_config(key):
    """The names in tokenizer_config.json may be those of another release of the model."""
    files = demo_files()
    files["tokenizer_config.json"] = b'{"image_token": "<|im_end|>"}'
    assert Tokenizer.from_files(files).image_token_id == 2
    files["config.json"] = json.dumps({key: 1}).encode()
    tokenizer = Tokenizer.from_files(files)
    assert (tokenizer.image_token_id, tokenizer.image_token) == (1, "<|im_start|>")
    files["config.json"] = b'{"image_token_id": 1, "image_token_index": 2}'
    with pytest.raises(CheckpointError, match="image_token_id and image_token_index"):
        Tokenizer.from_files(files)


def test_named_templates_lie_in_a_folder(tmp_path):
    for name, content in demo_files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config"}')
    (tmp_path / "chat_template.jinja").write_text("default")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools[0].name }}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(message) == "default"
    assert tokenizer.render_chat(message, tools=[{"name": "f"}]) == "f"
    assert tokenizer.chat_template.names == ["default", "tool_use"]


def test_template_files_replace_all_templates_of_the_config():
    """As in transformers: otherwise an old template for tools would serve beside a new file."""
    files = demo_files()
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old tools"}]
    files["tokenizer_config.json"] = json.dumps({"chat_template": named}).encode()
    assert Tokenizer.from_files(files).chat_template.names == ["default"]


def test_chat_template_json_is_for_models_with_images():
    files = demo_files()
    del files["chat_template.jinja"]
    files["tokenizer_config.json"] = b'{"chat_template": "text"}'
    files["chat_template.json"] = b'{"chat_template": "images"}'
    message = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_files(files, trusted=True).render_chat(message) == "text"
    files["config.json"] = b'{"vision_config": {}}'
    assert Tokenizer.from_files(files, trusted=True).render_chat(message) == "images"


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


@pytest.mark.parametrize("text", ["Hello world", "two  spaces", "naïve 漢字 🙂", "<0x41> ▁", ""])
def test_the_bytes_of_pieces_make_the_text(sentencepiece, text):
    """Log-probabilities show each token as the text and the bytes that it stands for."""
    ids = sentencepiece.encode(text, add_special_tokens=False)
    pieces = [sentencepiece.token_bytes(int(one)) for one in ids]
    assert b"".join(pieces).removeprefix(b" ") == text.replace("▁", " ").encode()
    assert sentencepiece.token_bytes(1) == b"<s>"
