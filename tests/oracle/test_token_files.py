"""Folders whose files state tokens and templates in all their ways: AutoTokenizer's or refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from baton.proto.errors import CheckpointError, InputError
from baton.text.tokenizer import Tokenizer

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; run make test-oracle"
)

DEMO_FOLDER = Path(__file__).parents[2] / "deploy" / "demo_model"
SEED = int(np.random.SeedSequence().entropy % (1 << 31))
FOLDERS = 150
NAMES = ["<x>", "<y>", "<z>", "<|im_end|>", "<|endoftext|>", "fox"]
TEXT = "a <x> b<y>c <z>fox <|im_end|> d<x><y> <|endoftext|>e fox"
NAMED = ["bos_token", "eos_token", "pad_token", "unk_token", "image_token", "mask_token"]
MESSAGES = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def some(rng, chance):
    return rng.random() < chance


def added(rng, content):
    flags = {name: bool(some(rng, 0.3)) for name in ("lstrip", "rstrip", "normalized", "special")}
    return {"content": content, "single_word": False, **flags}


def write_folder(rng, folder):
    """Write a folder and return what was changed."""
    folder.mkdir()
    for path in DEMO_FOLDER.glob("*.json"):
        shutil.copy(path, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {"<|endoftext|>": 0, "<|im_end|>": 2, "fox": None}
    if some(rng, 0.5):
        chosen = rng.choice(NAMES[:5], rng.integers(1, 4), replace=False)
        fresh = iter(range(1024 + int(some(rng, 0.15)), 1030))
        decoder = {ids[name] if name in ids else next(fresh): name for name in chosen}
        if some(rng, 0.1):
            decoder[7] = "<|im_end|>"
        config["added_tokens_decoder"] = {str(i): added(rng, str(c)) for i, c in decoder.items()}
    for name in NAMED:
        if some(rng, 0.15):
            config[name] = str(rng.choice(NAMES))
    for name in ("extra_special_tokens", "additional_special_tokens"):
        if some(rng, 0.15):
            config[name] = [str(c) for c in rng.choice(NAMES, 2, replace=False)]
    if some(rng, 0.15):
        config["extra_special_tokens"] = {"video_token": str(rng.choice(NAMES))}
    if some(rng, 0.4):
        chosen = [str(c) for c in rng.choice(NAMES[:3], 2, replace=False)]
        (folder / "added_tokens.json").write_text(
            json.dumps(dict(zip(chosen, (1024, 1025 + int(some(rng, 0.2))), strict=True)))
        )
    if some(rng, 0.4):
        older = {name: str(rng.choice(NAMES)) for name in NAMED[:4] if some(rng, 0.4)}
        if some(rng, 0.3):
            older["additional_special_tokens"] = [str(rng.choice(NAMES))]
        (folder / "special_tokens_map.json").write_text(json.dumps(older))
    write_templates(rng, folder, config)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_templates(rng, folder, config):
    if some(rng, 0.5):
        config["chat_template"] = "config {{ bos_token }}{{ eos_token }}"
    elif some(rng, 0.5):
        config["chat_template"] = [
            {"name": name, "template": f"config {name}"} for name in ("default", "tool_use")
        ]
    if some(rng, 0.5):
        (folder / "chat_template.jinja").write_text("file {{ bos_token }}{{ pad_token }}")
    if some(rng, 0.4):
        more = folder / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text("tools {{ tools[0].function.name }}")


def rendered(render):
    try:
        return render()
    except (InputError, ValueError):
        return None


def test_random_folders(tmp_path):
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    outcomes = Counter()
    for number in range(FOLDERS):
        folder = tmp_path / str(number)
        write_folder(rng, folder)
        files = {
            p.name: p.read_text()
            for p in folder.iterdir()
            if p.is_file() and p.suffix == ".json" and p.name != "tokenizer.json"
        }
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        try:
            ours = Tokenizer.from_folder(folder)
        except CheckpointError as error:
            assert " has id" in str(error), error
            outcomes["refused"] += 1
            continue
        outcomes["equal"] += 1
        assert ours.encode(TEXT).tolist() == theirs.encode(TEXT), files
        ids = list(range(1100))
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), files
        for name in NAMED:
            assert ours.special_tokens.get(name) == getattr(theirs, name, None), (name, files)
        for tools in (None, TOOLS):
            expected = rendered(
                lambda tools=tools, theirs=theirs: theirs.apply_chat_template(
                    MESSAGES, tools=tools, tokenize=False
                )
            )
            ours_text = rendered(
                lambda tools=tools, ours=ours: ours.render_chat(MESSAGES, tools=tools)
            )
            assert ours_text == expected, files
    print(dict(outcomes))
    assert outcomes["equal"] > FOLDERS / 2
