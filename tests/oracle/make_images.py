"""Writes tests/data/images.json: images, and digests of what transformers makes of them.

``python tests/oracle/make_images.py`` needs transformers and Pillow.
"""

import base64
import importlib.util
import io
import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TESTS = Path(__file__).parents[1]
TARGET = TESTS / "data" / "images.json"


def load_cases():
    spec = importlib.util.spec_from_file_location("cases", TESTS / "images" / "cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(content, settings):
    """Return grid and pixel values of an encoded image, turned as by transformers' load_image."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    done = Qwen2VLImageProcessorPil(**settings)(image, return_tensors="np")
    return done["image_grid_thw"][0].tolist(), done["pixel_values"]


def expected_tiles(content, settings):
    """Return canvas in tiles and pixel values ``[tiles, 3, n, n]``, as :func:`expected`."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    known = {name: value for name, value in settings.items() if name != "image_processor_type"}
    done = MllamaImageProcessorPil(**known)([[image]], return_tensors="np")
    most = settings["max_image_tiles"]
    ratios = [(r, c) for r in range(1, most + 1) for c in range(1, most + 1) if r * c <= most]
    canvas = ratios[int(done["aspect_ratio_ids"][0, 0]) - 1]
    assert done["aspect_ratio_mask"][0, 0].sum() == canvas[0] * canvas[1]
    return [1, *canvas], done["pixel_values"][0, 0]


def record(content, settings):
    """What a test compares: grid, shape and digest of an image."""
    tiled = "max_image_tiles" in settings
    grid, values = (expected_tiles if tiled else expected)(content, settings)
    data = np.ascontiguousarray(values, np.float32)
    digest = blake2b(data.tobytes(), digest_size=16).hexdigest()
    return {"grid": grid, "shape": list(values.shape), "digest": digest}


def main():
    cases = load_cases()
    every = {**cases.SETTINGS, "mllama": cases.TILES}
    made = {
        name: {
            "file": base64.b64encode(content).decode(),
            "expected": {model: record(content, one) for model, one in every.items()},
        }
        for name, content in cases.files().items()
    }
    TARGET.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
