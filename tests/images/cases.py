"""Images that Hugging Face's processor and Baton's must turn into the same numbers."""

import io

import numpy as np
from PIL import Image

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

SETTINGS = {
    "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 28 * 28 * 12},
    "qwen3_vl": {
        "size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 10},
        "patch_size": 16,
        "merge_size": 2,
    },
}
"""Contents of preprocessor_config.json by model, with small areas."""

TILES = {
    "image_processor_type": "MllamaImageProcessor",
    "size": {"height": 56, "width": 56},
    "max_image_tiles": 4,
    "image_mean": MEAN,
    "image_std": STD,
}
"""The same for a model whose images have tiles."""


def _picture(height, width, channels=3, seed=0):
    """A picture with smooth parts and edges, so that filters differ."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [
        127
        + 120 * np.sin(rows / (3 + i) + columns / (5 + 2 * i))
        + 20 * rng.normal(size=(height, width))
        for i in range(channels)
    ]
    picture = np.stack(planes, -1).clip(0, 255).astype(np.uint8)
    picture[height // 3 : height // 2, width // 4 : width // 2] = 250
    return picture


def _file(array, kind, mode=None, **options):
    image = Image.fromarray(array)
    image = image.convert(mode) if mode else image
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def _turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees
    return _file(_picture(40, 90), "JPEG", exif=exif)


def files():
    """Encoded images by name."""
    return {
        "png": _file(_picture(61, 83), "PNG"),
        "jpeg": _file(_picture(70, 50), "JPEG", quality=85),
        "webp": _file(_picture(64, 64), "WEBP", lossless=True),
        "bmp": _file(_picture(33, 47), "BMP"),
        "gif": _file(_picture(45, 45), "GIF", mode="P"),
        "grey": _file(_picture(50, 60)[:, :, 0], "PNG"),
        "alpha": _file(_picture(57, 43, channels=4), "PNG"),
        "palette with transparency": _file(_picture(40, 40), "PNG", mode="P", transparency=3),
        "one bit": _file(_picture(40, 52)[:, :, 0], "PNG", mode="1"),
        "cmyk": _file(_picture(48, 48), "JPEG", mode="CMYK"),
        "turned": _turned(),
        "shrunk": _file(_picture(300, 260), "PNG"),
        "long": _file(_picture(12, 700), "PNG"),
        "tiny": _file(_picture(3, 2), "PNG"),
        "one pixel": _file(_picture(1, 1), "PNG"),
        "halves": _file(_picture(42, 70), "PNG"),
    }


def patches(pixels, patch_size, merge_size):
    """Normalise and cut uint8 ``[H, W, 3]`` as the processor does: float32 ``[patches, n]``."""
    scaled = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    normal = (scaled - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    cut = normal.reshape(
        rows // merge_size, merge_size, patch_size,
        columns // merge_size, merge_size, patch_size, 3,
    ).transpose(0, 3, 1, 4, 6, 2, 5)  # fmt: skip
    twice = np.repeat(cut[:, :, :, :, :, None], 2, axis=5)
    return twice.reshape(rows * columns, -1)


def tiles(pixels, canvas, side, count):
    """Normalise and cut uint8 ``[H, W, 3]`` on a canvas of tiles: float32 ``[count, 3, n, n]``."""
    rows, columns = canvas
    whole = np.zeros((rows * side, columns * side, 3), np.uint8)
    whole[: pixels.shape[0], : pixels.shape[1]] = pixels
    scaled = (whole.astype(np.float64) * (1 / 255)).astype(np.float32)
    normal = (scaled - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    cut = normal.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    found = np.zeros((count, 3, side, side), np.float32)
    found[: rows * columns] = cut.reshape(-1, 3, side, side)
    return found
