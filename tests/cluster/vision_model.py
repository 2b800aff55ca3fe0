"""The committed checkpoints with vision, with a tokenizer, and requests with images for them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from ..images.model_files import END, PAD, START, TEMPLATE

DATA = Path(__file__).resolve().parents[1] / "data" / "vision" / "qwen2_5_vl"
IMAGE, IMAGE_START, IMAGE_END = 250, 252, 253
MLLAMA = DATA.with_name("mllama")
TILED_IMAGE = 256
PREPROCESSOR = {
    **json.loads((DATA / "preprocessor_config.json").read_text()),
    "patch_size": 4,
    "merge_size": 2,
    "min_pixels": 64,
    "max_pixels": 64 * 1600,
}
"""A token is a square of 8 pixels."""


def vision_folder(folder: Path, data: Path = DATA) -> Path:
    """Make the model's folder: one token per printable letter, tokens for images."""
    _write_model(folder, data, {IMAGE: PAD, IMAGE_START: START, IMAGE_END: END})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def mllama_folder(folder: Path) -> Path:
    """Make the folder of the model with cross-attention, likewise."""
    _write_model(folder, MLLAMA, {TILED_IMAGE: "<|image|>"})
    one = "<|vision_start|><|image_pad|><|vision_end|>"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(one, "<|image|>"))
    shutil.copy(MLLAMA / "preprocessor_config.json", folder / "preprocessor_config.json")
    return folder


def _write_model(folder: Path, data: Path, images: dict[int, str]) -> None:
    """Write the weights and a tokenizer with tokens for ``images``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(data / name, folder / name)
    letters = ["\n", *map(chr, range(32, 127))]
    specials = {0: "<unk>", 1: "<s>", 2: "</s>", **images}
    vocab = {one: at for at, one in enumerate(letters, 10)} | {t: at for at, t in specials.items()}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": at, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for at, text in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "vocab": vocab, "merges": [],
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False,
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """A random picture, uint8 ``[height, width, 3]``."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def png(array: np.ndarray) -> bytes:
    """The PNG file of a picture."""
    content = io.BytesIO()
    Image.fromarray(array).save(content, "PNG")
    return content.getvalue()


def reference(data: Path = DATA) -> list[tuple[list[int], list[np.ndarray], list[int]]]:
    """Prompts with one placeholder per image, their images, and transformers' greedy tokens."""
    arrays = np.load(data / "reference.npz")
    found = []
    while f"prompt_{len(found)}" in arrays:
        i = len(found)
        ids = arrays[f"prompt_{i}"].tolist()
        short = [t for at, t in enumerate(ids) if t != IMAGE or ids[at - 1] != IMAGE]
        images = [arrays[f"pixels_{i}_{j}"] for j in range(len(arrays[f"grids_{i}"]))]
        found.append((short, images, arrays[f"greedy_{i}"].tolist()))
    return found
