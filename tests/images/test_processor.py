"""The processor beside recorded results of transformers, and on hostile files."""

import base64
import io
import json
import os
import struct
import subprocess
import sys
import threading
import zlib
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from baton.images import processor as processors
from baton.images.decode import MAX_IMAGE_PIXELS
from baton.images.processor import ImageProcessor, ScaledImage
from baton.images.settings import ImageSettings, read_settings
from baton.images.tiles import TileSettings
from baton.proto.contexts.images import image_hash
from baton.proto.errors import CapacityError, CheckpointError, InputError

from .cases import SETTINGS, TILES, patches, tiles

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "images.json").read_text())


def settings_of(config):
    return ImageSettings.from_files({"preprocessor_config.json": json.dumps(config).encode()})


@pytest.fixture(scope="module", params=SETTINGS)
def made(request):
    processor = ImageProcessor(settings_of(SETTINGS[request.param]))
    yield request.param, processor
    processor.close()


@pytest.fixture(scope="module")
def processor():
    processor = ImageProcessor(ImageSettings(max_pixels=28 * 28 * 16))
    yield processor
    processor.close()


def digest(values):
    return blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).hexdigest()


@pytest.mark.parametrize("name", RECORDED)
def test_pixel_values_equal_those_of_transformers(made, name):
    model, processor = made
    done = processor.process(base64.b64decode(RECORDED[name]["file"]))
    expected = RECORDED[name]["expected"][model]
    settings = processor.settings
    values = patches(done.pixels, settings.patch_size, settings.merge_size)
    assert list(done.grid) == expected["grid"]
    assert list(values.shape) == expected["shape"]
    assert digest(values) == expected["digest"]
    assert done.tokens == len(values) // settings.merge_size**2


@pytest.fixture(scope="module")
def tiled():
    files = {"preprocessor_config.json": json.dumps(TILES).encode()}
    processor = ImageProcessor(read_settings(files))
    yield processor
    processor.close()


@pytest.mark.parametrize("name", RECORDED)
def test_pixel_values_of_tiles_equal_those_of_transformers(tiled, name):
    done = tiled.process(base64.b64decode(RECORDED[name]["file"]))
    expected = RECORDED[name]["expected"]["mllama"]
    values = tiles(done.pixels, done.grid[1:], 56, 4)
    assert list(done.grid) == expected["grid"]
    assert list(values.shape) == expected["shape"]
    assert digest(values) == expected["digest"]
    assert done.pixels.nbytes <= 3 * tiled.settings.most_pixels


def test_pixels_in_the_size_of_tiles_are_taken_as_they_are(tiled):
    pixels = np.random.default_rng(1).integers(0, 256, (100, 56, 3), np.uint8)
    done = tiled.process(pixels)
    assert done.grid == (1, 2, 1)
    np.testing.assert_array_equal(done.pixels, pixels)


@pytest.mark.parametrize(
    "changed",
    [
        {"do_resize": False},
        {"do_pad": False},
        {"size": {"height": 56, "width": 28}},
        {"size": {"shortest_edge": 56}},
        {"size": 56},
        {"size": {"height": 0, "width": 0}},
        {"size": {"height": 2.5, "width": 2.5}},
        {"max_image_tiles": 0},
        {"max_image_tiles": 65},
        {"max_image_tiles": True},
        {"resample": 6},
        {"size": {"height": 4000, "width": 4000}},
    ],
)
def test_wrong_settings_of_tiles_are_refused(changed):
    files = {"preprocessor_config.json": json.dumps({**TILES, **changed}).encode()}
    with pytest.raises(CheckpointError):
        read_settings(files)


def test_the_settings_of_tiles_have_the_defaults_of_the_class():
    files = {"preprocessor_config.json": b'{"image_processor_type": "MllamaImageProcessorPil"}'}
    assert read_settings(files) == TileSettings(224, 4, 2)
    with pytest.raises(CheckpointError, match="MllamaImageProcessor"):
        ImageSettings.from_files(files)


class TestForms:
    def test_path_bytes_pillow_and_array_give_the_same(self, processor, tmp_path):
        content = base64.b64decode(RECORDED["png"]["file"])
        path = tmp_path / "image.png"
        path.write_bytes(content)
        opened = Image.open(path)
        forms = [content, bytearray(content), path, str(path), opened, np.array(opened)]
        done = [processor.process(form) for form in forms]
        assert all(np.array_equal(one.pixels, done[0].pixels) for one in done)
        assert len({one.content_hash for one in done}) == 1

    def test_an_image_object_is_turned_like_its_file(self, processor):
        content = base64.b64decode(RECORDED["turned"]["file"])
        opened = processor.process(Image.open(io.BytesIO(content)))
        assert np.array_equal(opened.pixels, processor.process(content).pixels)

    def test_a_grey_array_is_an_image(self, processor):
        grey = np.full((40, 40), 7, np.uint8)
        assert (processor.process(grey).pixels == 7).all()

    @pytest.mark.parametrize(
        "wrong",
        [7, None, [1, 2], np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 2), np.uint8),
         np.zeros((0, 4, 3), np.uint8), "/nowhere/image.png", b"", "a\0b", "/dev/zero", "/"],
    )  # fmt: skip
    def test_other_values_are_refused(self, processor, wrong):
        with pytest.raises(InputError):
            processor.process(wrong)

    def test_the_hash_is_of_pixels_and_shape(self):
        pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
        assert image_hash(pixels) == image_hash(pixels.copy()) < 1 << 64
        assert image_hash(pixels) != image_hash(pixels.reshape(4, 2, 3))
        assert image_hash(pixels) != image_hash(pixels ^ 1)


# --------------------------------------------------------------------------- hostile files


def png(width, height, rows, depth=8, colour=2):
    """A PNG file by hand; ``rows``: the raw image data, which may not fit the header."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    packed = zlib.compress(rows, 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )


def animation(kind):
    frames = [Image.new("RGB", (32, 32), (i * 60, 0, 0)) for i in range(3)]
    content = io.BytesIO()
    frames[0].save(content, kind, save_all=True, append_images=frames[1:])
    return content.getvalue()


def deep(mode):
    content = io.BytesIO()
    Image.fromarray(np.full((30, 30), 40000, np.uint16)).convert(mode).save(content, "PNG")
    return content.getvalue()


PLAIN = base64.b64decode(RECORDED["png"]["file"])
JPEG = base64.b64decode(RECORDED["jpeg"]["file"])
HOSTILE = {
    "text": (b"hello" * 100, "cannot be read"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "cannot be read"),
    "truncated png": (PLAIN[: len(PLAIN) // 2], "damaged"),
    "truncated jpeg": (JPEG[: len(JPEG) // 2], "damaged"),
    "header only": (PLAIN[:40], "damaged|cannot be read"),
    "wrong checksum": (PLAIN[:60] + bytes([PLAIN[60] ^ 1]) + PLAIN[61:], "damaged|cannot be read"),
    "too many pixels": (png(30000, 30000, b""), f"at most {MAX_IMAGE_PIXELS}"),
    "bomb": (png(60000, 60000, bytes(1 << 20)), f"at most {MAX_IMAGE_PIXELS}"),
    "bomb without a limit": (png((1 << 31) - 1, (1 << 31) - 1, b""), "at most|cannot be read"),
    "too narrow": (png(3000, 1, bytes(1 + 9000)), "too narrow"),
    "no pixels": (png(0, 5, b""), "cannot be read|damaged|empty"),
    "gif animation": (animation("GIF"), "animated"),
    "png animation": (animation("PNG"), "animated"),
    "webp animation": (animation("WEBP"), "animated"),
    "16 bit grey": (deep("I;16"), "8 bits per channel"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_input_error(processor, name):
    content, message = HOSTILE[name]
    with pytest.raises(InputError, match=message):
        processor.process(content)


def test_the_processor_works_after_hostile_files(processor):
    pids = {helper._process.pid for helper in processor._all if helper._process}
    for content, _ in HOSTILE.values():
        with pytest.raises(InputError):
            processor.process(content)
    assert processor.process(PLAIN).tokens
    assert pids <= {helper._process.pid for helper in processor._all if helper._process}


def test_16_bit_colours_lose_their_low_byte(processor):
    rows = b"".join(b"\0" + b"\x12\x34" * 3 * 30 for _ in range(30))
    assert (processor.process(png(30, 30, rows, depth=16)).pixels == 0x12).all()


def test_too_many_bytes_are_refused_before_the_helper(processor, tmp_path, monkeypatch):
    monkeypatch.setattr(processors, "MAX_IMAGE_BYTES", 1000)
    large = tmp_path / "large.png"
    large.write_bytes(PLAIN)
    for form in (PLAIN, large):
        with pytest.raises(InputError, match="limit 1000"):
            processor.process(form)


def test_a_helper_that_needs_too_much_is_replaced():
    small = ImageProcessor(ImageSettings(), memory_bytes=256 << 20)
    try:
        large = png(6000, 6000, b"".join([bytes(1 + 3 * 6000)] * 6000))
        with pytest.raises(InputError, match="memory"):
            small.process(large)
        assert small.process(PLAIN).tokens
    finally:
        small.close()


def test_a_helper_that_takes_too_long_is_killed():
    slow = ImageProcessor(ImageSettings(), timeout=1e-3)
    try:
        large = png(3000, 3000, b"".join([bytes(1 + 3 * 3000)] * 3000))
        with pytest.raises(InputError, match=r"more than 0\.001 s"):
            slow.process(large)
        assert not any(helper._process for helper in slow._all)
    finally:
        slow.close()


def test_a_helper_that_cannot_start_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(5)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = ImageProcessor(ImageSettings())
    with pytest.raises(CapacityError, match="cannot start: it ended with exit code 5"):
        broken.process(PLAIN)
    assert not any(helper._process for helper in broken._all)


def test_threads_share_the_helpers(processor):
    files = [base64.b64decode(one["file"]) for one in RECORDED.values()]
    other = ImageProcessor(processor.settings)
    expected = {other.process(file).content_hash for file in files}
    other.close()
    found = []
    threads = [
        threading.Thread(target=lambda file=file: found.append(processor.process(file)))
        for file in files
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.content_hash for one in found} == expected
    assert len(found) == len(files)


def test_recent_images_are_not_decoded_again(monkeypatch):
    processor = ImageProcessor(ImageSettings(max_pixels=28 * 28 * 16))
    first = processor.process(PLAIN)
    processor.close()
    assert processor.process(PLAIN) is first
    assert not any(helper._process for helper in processor._all)
    monkeypatch.setattr(processors, "RECENT_BYTES", first.pixels.nbytes)
    processor.process(JPEG)
    assert list(processor._recent.values()) != [first]
    assert processor._recent_bytes <= first.pixels.nbytes
    processor.close()


def test_close_ends_the_processes():
    processor = ImageProcessor(ImageSettings())
    processor.process(PLAIN)
    pids = [helper._process.pid for helper in processor._all if helper._process]
    processor.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_without_pillow_one_clear_error():
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from baton.images.processor import ImageProcessor\n"
        "from baton.images.settings import ImageSettings\n"
        "try: ImageProcessor(ImageSettings()).process(b'x')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError images need Pillow: pip install")


def test_rgb_arrays_in_the_model_s_size_need_no_pillow(processor):
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "import numpy as np\n"
        "from baton.images.processor import ImageProcessor\n"
        "from baton.images.settings import ImageSettings\n"
        "one = ImageProcessor(ImageSettings(max_pixels=28 * 28 * 16))\n"
        "done = one.process(np.arange(84 * 56 * 3).astype(np.uint8).reshape(84, 56, 3))\n"
        "print(done.content_hash, done.grid, done.tokens)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pixels = np.arange(84 * 56 * 3).astype(np.uint8).reshape(84, 56, 3)
    opened = processor.process(Image.fromarray(pixels))
    assert np.array_equal(opened.pixels, pixels)
    assert done.stdout.split("\n")[0] == f"{opened.content_hash} {opened.grid} {opened.tokens}"


# --------------------------------------------------------------------------- settings


class TestSettings:
    def test_both_forms_of_the_bounds(self):
        old = settings_of({"min_pixels": 1000, "max_pixels": 200000})
        new = settings_of({"size": {"shortest_edge": 1000, "longest_edge": 200000}})
        middle = settings_of({"size": {"min_pixels": 1000, "max_pixels": 200000}})
        assert old == new == middle
        both = settings_of({"max_pixels": 5000, "size": {"longest_edge": 9000}})
        assert both.max_pixels == 5000

    def test_defaults_are_those_of_the_class(self):
        assert settings_of({}) == ImageSettings(3136, 28 * 28 * 1280, 14, 2, 3)

    def test_settings_inside_a_processor_config(self):
        inner = {"image_processor": {"patch_size": 16, "max_pixels": 99999}}
        found = ImageSettings.from_files({"processor_config.json": json.dumps(inner).encode()})
        assert (found.patch_size, found.max_pixels) == (16, 99999)

    @pytest.mark.parametrize(
        "config",
        [
            {"image_processor_type": "CLIPImageProcessor"},
            {"do_resize": False},
            {"patch_size": 0},
            {"patch_size": True},
            {"merge_size": "2"},
            {"max_pixels": 10**12},
            {"min_pixels": 9000, "max_pixels": 8000},
            {"resample": 9},
            {"max_pixels": float("inf")},
        ],
    )
    def test_wrong_settings_are_refused(self, config):
        with pytest.raises(CheckpointError):
            settings_of(config)

    @pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 99999, b"null"])
    def test_files_that_are_no_settings(self, content):
        with pytest.raises(CheckpointError):
            ImageSettings.from_files({"preprocessor_config.json": content})
        with pytest.raises(CheckpointError):
            ImageSettings.from_files({})

    @pytest.mark.parametrize("size", [(1, 1), (1, 200), (2, 3), (4000, 30), (5000, 5000)])
    def test_sizes_are_whole_tokens_within_the_bounds(self, size):
        for settings in (ImageSettings(), ImageSettings(65536, 1 << 22, 16, 2)):
            height, width = settings.resized(*size)
            assert height % settings.token_side == width % settings.token_side == 0
            assert settings.min_pixels <= height * width <= settings.max_pixels


@pytest.mark.parametrize("size", [(1000, 400), (300, 1024), (513, 513), (512, 100), (40, 30)])
def test_a_scaled_image_is_one_that_was_scaled_before(size):
    """``detail: low`` equals an image that the sender scales to 512 pixels."""
    processor = ImageProcessor(ImageSettings())
    noise = np.random.default_rng(5).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(noise)
    file = io.BytesIO()
    image.save(file, "PNG")
    if max(size) > 512:
        scale = 512 / max(size)
        sides = tuple(round(side * scale) for side in size)
        image = image.resize(sides, resample=Image.Resampling.BICUBIC)
    try:
        expected = processor.process(image)
        for _ in range(2):  # the second is one of the kept images
            found = processor.process(ScaledImage(file.getvalue(), 512))
            assert np.array_equal(found.pixels, expected.pixels)
        whole = processor.process(file.getvalue())
        assert (whole.content_hash == found.content_hash) == (max(size) <= 512)
    finally:
        processor.close()


def test_scaling_keeps_a_pixel_of_each_side(processor):
    line = io.BytesIO()
    Image.new("RGB", (2000, 1)).save(line, "PNG")
    with pytest.raises(InputError, match="200"):
        processor.process(ScaledImage(line.getvalue(), 512))
