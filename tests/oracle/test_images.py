"""Fresh random images through Baton's processor and transformers': equal to the last bit."""

import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from baton.images.processor import ImageProcessor
from baton.images.settings import ImageSettings, read_settings

pytestmark = pytest.mark.oracle


def _module(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
def test_pixel_values_equal_transformers(model):
    pytest.importorskip("transformers")
    make = _module("make_images")
    cases, expected = make.load_cases(), make.expected
    settings = cases.SETTINGS[model]
    own = ImageSettings.from_files({"preprocessor_config.json": json.dumps(settings).encode()})
    processor = ImageProcessor(own)
    rng = np.random.default_rng()
    try:
        for number in range(60):
            height, width = rng.integers(1, 260, 2)
            kind = ("PNG", "JPEG", "WEBP", "BMP")[number % 4]
            channels = 4 if kind in ("PNG", "WEBP") and number % 3 == 0 else 3
            if max(height, width) / min(height, width) > 200:
                continue
            array = rng.integers(0, 256, (height, width, channels), np.uint8)
            content = io.BytesIO()
            Image.fromarray(array).save(content, kind)
            grid, values = expected(content.getvalue(), settings)
            done = processor.process(content.getvalue())
            assert list(done.grid) == grid
            mine = cases.patches(done.pixels, own.patch_size, own.merge_size)
            assert np.array_equal(mine, values)
    finally:
        processor.close()


def test_pixel_values_of_tiles_equal_transformers():
    """Sizes around the bounds of canvases, and random ones."""
    pytest.importorskip("transformers")
    make = _module("make_images")
    cases = make.load_cases()
    settings = {**cases.TILES, "size": {"height": 28, "width": 28}}
    files = {"preprocessor_config.json": json.dumps(settings).encode()}
    processor = ImageProcessor(read_settings(files))
    rng = np.random.default_rng()
    bounds = [1, 27, 28, 29, 56, 57, 84, 85, 112, 113]
    sizes = [(int(a), int(b)) for a in bounds for b in bounds]
    sizes += [tuple(map(int, rng.integers(1, 260, 2))) for _ in range(60)]
    canvases = set()
    try:
        for number, (height, width) in enumerate(sizes):
            channels = 4 if number % 7 == 0 else 3
            array = rng.integers(0, 256, (height, width, channels), np.uint8)
            content = io.BytesIO()
            Image.fromarray(array).save(content, "PNG")
            grid, values = make.expected_tiles(content.getvalue(), settings)
            done = processor.process(content.getvalue())
            assert list(done.grid) == grid, (height, width)
            mine = cases.tiles(done.pixels, done.grid[1:], 28, 4)
            assert np.array_equal(mine, values), (height, width)
            canvases.add(done.grid)
        assert len(canvases) == 8
    finally:
        processor.close()
