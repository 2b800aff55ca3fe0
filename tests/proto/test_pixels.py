import base64
import struct
import sys
import zlib

import numpy as np
import pytest

from baton.proto import (
    ConfigError,
    GenerationOutput,
    GenerationStatus,
    InputError,
    OutputImageContent,
    PixelContext,
    RequestID,
    TokenBuffer,
)
from baton.proto.contexts.pixels import encode_png


def context(**fields):
    return PixelContext(tokens=TokenBuffer(np.array([1, 2, 3])), **fields)


def test_defaults():
    ctx = context()
    assert ctx.model_name == ""
    assert ctx.mask is ctx.tokens_2 is ctx.negative_tokens is ctx.negative_tokens_2 is None
    assert ctx.guidance is None
    assert ctx.extra_params == {}
    for array in (ctx.timesteps, ctx.sigmas, ctx.latents, ctx.latent_image_ids):
        assert (array.dtype, array.size) == (np.float32, 0)
    assert (ctx.height, ctx.width, ctx.num_inference_steps) == (1024, 1024, 50)
    assert (ctx.guidance_scale, ctx.true_cfg_scale) == (3.5, 1.0)
    assert (ctx.num_warmup_steps, ctx.num_images_per_prompt) == (0, 1)
    assert ctx.status is GenerationStatus.ACTIVE
    assert not ctx.is_done
    with pytest.raises(TypeError):
        PixelContext()


def test_steps_update_and_reset():
    ctx = context(num_inference_steps=7)
    assert [ctx.compute_num_available_steps(n) for n in (0, 1000)] == [7, 7]
    ctx.update(np.ones(3))
    ctx.update_status(GenerationStatus.CANCELLED)
    assert ctx.is_done
    ctx.reset()
    assert not ctx.is_done
    assert ctx.latents.tolist() == [1, 1, 1]


def test_output_is_one_png_once_the_latents_are_pixels():
    ctx = context(request_id="r")
    ctx.update(np.zeros(6, np.float32))
    with pytest.raises(ValueError, match="Expected 2D or 3D array"):
        ctx.to_generation_output()
    ctx.update(np.zeros((4, 6, 3), np.uint8))
    ctx.update_status(GenerationStatus.END_OF_SEQUENCE)
    output = ctx.to_generation_output()
    assert (output.request_id, output.is_done) == (RequestID("r"), True)
    (content,) = output.output
    assert (content.type, content.format) == ("output_image", "png")
    assert base64.b64decode(content.image_data) == encode_png(np.zeros((4, 6, 3), np.uint8))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_latents_of_floats_from_0_to_1_are_pixels(kind):
    steps = np.arange(256).reshape(16, 16)
    ctx = PixelContext(tokens=TokenBuffer(np.array([1])), latents=(steps / 255).astype(kind))
    (content,) = ctx.to_generation_output().output
    assert base64.b64decode(content.image_data) == encode_png(steps.astype(np.uint8))


@pytest.mark.parametrize("value", [-0.01, 1.01, np.nan, np.inf])
def test_latents_that_no_decoder_has_seen_are_refused(value):
    latents = np.zeros((4, 6, 3), np.float32)
    latents[1, 2, 0] = value
    with pytest.raises(InputError, match="from 0 to 1"):
        PixelContext(tokens=[1], latents=latents).to_generation_output()


def test_value_equality_and_wrapping():
    one, two = context(request_id="r"), PixelContext(tokens=[1, 2, 3], request_id="r")
    assert one == two
    two.update(np.ones(1))
    assert one != two
    assert one != "r"


def read_png(data):
    """Decode pixels by the rules of the format, independently of the encoder."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = [], 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        body = data[at + 4 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(body)
        chunks.append((body[:4], body[4:]))
        at += 12 + size
    assert [name for name, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (depth, rest) == (8, [0, 0, 0])
    channels = {0: 1, 2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(chunks[1][1]), np.uint8).reshape(height, -1)
    assert (rows[:, 0] == 1).all()  # a sample is that of the pixel before plus a difference
    differences = rows[:, 1:].reshape(height, width, channels)
    return np.cumsum(differences, axis=1, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 3), (3, 5, 4), (1, 1)])
def test_png(shape):
    pixels = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    assert np.array_equal(read_png(encode_png(pixels)), pixels.reshape(*shape[:2], -1))
    turned = np.asfortranarray(pixels)
    assert encode_png(turned) == encode_png(pixels)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros(4, np.uint8), "Expected 2D or 3D array"),
        (np.zeros((1, 2, 2, 3), np.uint8), "Expected 2D or 3D array"),
        (np.zeros(4, np.float32), "Expected 2D or 3D array"),
        (np.zeros((2, 2, 2), np.uint8), "Unsupported number of channels: 2"),
        (np.zeros((2, 2, 5), np.float32), "Unsupported number of channels: 5"),
        (np.zeros((2, 2, 0), np.uint8), "Unsupported number of channels: 0"),
        (np.zeros((2, 2), np.int16), "uint8, not int16"),
        (np.zeros((0, 2), np.uint8), "no pixels"),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else "",
)
def test_what_is_no_image(array, reason):
    with pytest.raises(ValueError, match=reason):
        OutputImageContent.from_numpy(array)


def test_format_and_detail_are_passed_on():
    content = OutputImageContent.from_numpy(np.zeros((2, 2), np.uint8), format="PNG", detail="high")
    assert (content.format, content.detail) == ("png", "high")
    assert OutputImageContent.from_numpy(np.zeros((2, 2), np.uint8)).detail is None


def test_other_formats_need_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="Pillow"):
        OutputImageContent.from_numpy(np.zeros((2, 2), np.uint8), format="jpeg")


def test_other_formats():
    content = OutputImageContent.from_numpy(np.zeros((2, 2), np.uint8), format="JPEG")
    assert content.format == "jpeg"
    assert base64.b64decode(content.image_data)[:2] == b"\xff\xd8"
    with pytest.raises(InputError, match="RGBA"):
        OutputImageContent.from_numpy(np.zeros((2, 2, 4), np.uint8), format="jpeg")
    with pytest.raises(InputError, match="nothing"):
        OutputImageContent.from_numpy(np.zeros((2, 2), np.uint8), format="nothing")


def test_outputs_are_frozen_and_say_what_they_are():
    output = GenerationOutput(request_id=RequestID("r"), final_status=GenerationStatus.ACTIVE)
    assert not output.is_done
    with pytest.raises(AttributeError):
        output.final_status = None
    with pytest.raises(ValueError, match="type"):
        OutputImageContent(type="output_text")
