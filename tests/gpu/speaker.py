"""A speech model whose heads the CUDA kernels support, with the small codec of the tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from baton.benchmarks.checkpoints import Shape, write_checkpoint

CODEC = Path(__file__).parents[1] / "data" / "codecs" / "snac"
FIRST = 16
"""The first audio token; the codec has 7 times 32 of them."""
SHAPE = Shape("speaker", vocab=240, hidden=128, intermediate=192, layers=2, heads=2, kv_heads=1)


def make_speaker(folder: Path) -> Path:
    """Write a random model in bfloat16; all tokens from the 16th on are audio tokens."""
    write_checkpoint(folder, SHAPE, "BF16")
    shutil.copytree(CODEC, folder / "snac")
    (folder / "speech.json").write_text(json.dumps({"first_token": FIRST}))
    return folder
