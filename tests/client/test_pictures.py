"""Pictures through both clients and a real router; a scripted worker ends them with a PNG."""

from __future__ import annotations

import asyncio
import json
import math
import struct
import zlib

import msgspec
import numpy as np
import pytest

from baton.client import AsyncClient, Client, Picture, PictureOptions
from baton.client.description import Description
from baton.client.events import Ended
from baton.client.model import ServedModel
from baton.client.options import RequestOptions
from baton.client.pictures import _CHECKS, _OPTIONS, PictureJob
from baton.proto.contexts.pixels import decode_png, encode_png, png_size
from baton.proto.errors import (
    CheckpointError,
    DeadlineExceeded,
    InputError,
    InternalError,
    TaskMismatch,
)
from baton.proto.layout import KVLayout
from baton.proto.picture_requests import preview_steps
from baton.router.describe import read_text_files

from ..model_cards import model_card
from ..processes import wait_until
from .conftest import CARD, DEMO, Cluster, Playback

FLUX = DEMO.parents[1] / "tests" / "data" / "pictures" / "flux"
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16)
PAINTER = model_card(
    name="flux", vocab_size=1 << 16, max_length=2048, task="draw", kinds=["PixelContext"],
    layout=LAYOUT, eos_token_ids=[],
)  # fmt: skip
TINY = {"width": 32, "height": 16}


def pixels_of(playback: Playback) -> np.ndarray:
    """Pixels that depend on the request's seed."""
    context = playback.assign.context
    seed = int(context.extra_params["seed"][0])
    shape = (context.height, context.width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def preview_of(playback: Playback) -> bytes | None:
    """One grey, as light as steps are done, after the steps that have a preview."""
    context = playback.assign.context
    done = playback.generated[-1] - len(context.tokens)
    if done not in preview_steps(context):
        return None
    return encode_png(np.full((8, 8, 3), done, np.uint8))


@pytest.fixture(scope="module")
def painter(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("painter"), FLUX, PAINTER)
    cluster.prefill.answer = lambda position: position
    cluster.prefill.media = lambda playback: encode_png(pixels_of(playback))
    cluster.prefill.preview = preview_of
    cluster.start()
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def client(painter):
    with Client(painter.address) as client:
        yield client


@pytest.fixture(scope="module")
def files():
    return read_text_files(str(FLUX), 1 << 24)


@pytest.fixture(scope="module")
def dev(files):
    model = ServedModel(Description(PAINTER, "/models/flux", files))
    yield model
    model.close()


@pytest.fixture(scope="module")
def schnell(files):
    config = json.loads(files["transformer/config.json"]) | {"guidance_embeds": False}
    changed = {**files, "transformer/config.json": json.dumps(config).encode()}
    model = ServedModel(Description(PAINTER, "/models/flux", changed))
    yield model
    model.close()


def zimage_of(changes):
    """Z-Image with a changed config of the scheduler."""
    files = dict(read_text_files(str(FLUX.with_name("zimage")), 1 << 24))
    name = "scheduler/scheduler_config.json"
    files[name] = json.dumps(json.loads(files[name]) | changes).encode()
    card = msgspec.structs.replace(PAINTER, name="zimage", architecture="ZImagePipeline")
    return ServedModel(Description(card, "/models/zimage", files))


@pytest.fixture(scope="module")
def turbo():
    model = zimage_of({})
    yield model
    model.close()


@pytest.fixture(scope="module")
def base():
    model = zimage_of({"shift": 6.0})
    yield model
    model.close()


def wire(model, prompt="a red house", **settings):
    return PictureJob(model, prompt, settings).spec.context


# --------------------------------------------------------------------------- whole calls


def test_a_picture_with_its_progress(client, tmp_path):
    steps = []
    picture = client.image(
        "a red house", seed=7, steps=3, on_progress=lambda *both: steps.append(both), **TINY
    )
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert (picture.width, picture.height, picture.seed, picture.steps) == (32, 16, 7, 3)
    assert picture.pixels().shape == (16, 32, 3)
    assert np.array_equal(
        picture.pixels(), np.random.default_rng(7).integers(0, 256, (16, 32, 3), np.uint8)
    )
    picture.save(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == picture.png
    assert "png" not in repr(picture)


def test_previews_arrive_with_their_steps(client):
    seen = []

    def take(png, done, total):
        assert decode_png(png)[0, 0].tolist() == [done] * 3
        seen.append((done, total))

    client.image("a", seed=1, steps=8, on_preview=take, **TINY)
    assert seen == [(2, 8), (4, 8), (6, 8)]
    seen.clear()
    client.image("a", seed=1, steps=8, previews=1, on_preview=take, **TINY)
    assert seen == [(4, 8)]
    client.image("a", seed=1, steps=8, previews=0, on_preview=take, **TINY)
    assert len(seen) == 1


def test_the_async_client_draws_the_same(painter, client):
    async def both():
        async with AsyncClient(painter.address) as other:
            steps = []
            calls = [
                other.image("a", seed=7, steps=2, on_progress=lambda *x: steps.append(x), **TINY),
                other.image("a", steps=2, **TINY),
            ]
            return await asyncio.gather(*calls), steps

    (one, two), steps = asyncio.run(both())
    assert one.png == client.image("a", seed=7, steps=2, **TINY).png
    assert one.png != two.png
    assert client.image("a", seed=two.seed, steps=2, **TINY).png == two.png
    assert steps == [(0, 2), (1, 2), (2, 2)]


def test_an_error_of_on_progress_cancels_the_request(painter, client):
    def fail(done, total):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.image("a", steps=250, on_progress=fail, **TINY)
    wait_until(lambda: not painter.prefill.running)


def test_a_cancelled_task_cancels_the_request(painter):
    async def cancelled():
        async with AsyncClient(painter.address) as client:
            begun = asyncio.Event()
            call = client.image("a", steps=250, on_progress=lambda *_: begun.set(), **TINY)
            task = asyncio.ensure_future(call)
            await begun.wait()
            assert painter.prefill.running
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            while painter.prefill.running:
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(cancelled(), 30))


def test_a_deadline_ends_a_picture(client):
    with pytest.raises(DeadlineExceeded):
        client.image("a", steps=250, deadline=0.05, **TINY)


def test_other_calls_are_refused_before_anything_is_sent(painter, client):
    count = len(painter.prefill.assigned)
    for call in (
        lambda: client.complete("hello"),
        lambda: client.complete([1, 2]),
        lambda: client.complete_chat([{"role": "user", "content": "hello"}]),
        lambda: client.embed(["hello"]),
    ):
        with pytest.raises(TaskMismatch, match="'flux' is a picture model"):
            call()
    assert len(painter.prefill.assigned) == count


def test_a_text_model_draws_nothing():
    with pytest.raises(TaskMismatch, match="'demo' draws no pictures"):
        PictureJob(ServedModel(Description(CARD, "", {})), "a", {})


# --------------------------------------------------------------------------- requests


def test_defaults_of_dev_and_schnell(dev, schnell):
    one, two = wire(dev), wire(schnell)
    assert (one.num_inference_steps, one.guidance_scale) == (28, 3.5)
    assert (two.num_inference_steps, two.guidance_scale) == (4, 0.0)
    assert (len(one.tokens_2), len(two.tokens_2)) == (512, 256)
    for each in (one, two):
        assert (each.width, each.height, each.true_cfg_scale) == (32, 32, 1.0)  # the VAE's own
        assert each.negative_tokens is None
        assert each.task == "draw"


def test_a_negative_prompt_turns_true_cfg_on(dev):
    found = wire(dev, negative_prompt="")
    assert found.true_cfg_scale == 4.0
    assert len(found.negative_tokens_2) == 512
    assert wire(dev, negative_prompt="blue", true_cfg=2).true_cfg_scale == 2.0


def test_options_of_the_request_are_kept(dev):
    options = {"cache_salt": "s", "target_endpoint": "ipc:///tmp/x", "deadline": 3, "pool": "p",
               "max_retries": 2, "request_id": "r"}  # fmt: skip
    spec = PictureJob(dev, "a", options).spec
    assert (spec.context.cache_salt, spec.context.target_endpoint) == ("s", "ipc:///tmp/x")
    assert (spec.deadline, spec.pool, spec.max_retries, spec.request_id) == (3.0, "p", 2, "r")


def test_seeds_differ_if_none_is_given(dev):
    seeds = {int(wire(dev).extra_params["seed"][0]) for _ in range(8)}
    assert len(seeds) == 8
    assert wire(dev, seed=2**64 - 1).extra_params["seed"].dtype == np.uint64


WRONG = [
    ({"width": 1000}, "width must be a multiple of 16, 16 to 4096, not 1000"),
    ({"height": 17}, "height must be a multiple of 16"),
    ({"width": 0}, "width"),
    ({"width": -16}, "width"),
    ({"width": 8192}, "width"),
    ({"width": 512.0}, "width"),
    ({"width": "512"}, "width"),
    ({"width": True}, "width"),
    ({"width": 4096, "height": 4096}, "picture too large: 4096 x 4096"),
    ({"steps": 0}, "steps must be a whole number, 1 to 250, not 0"),
    ({"steps": 10**6}, "steps must be a whole number, 1 to 250"),
    ({"steps": 2.5}, "steps"),
    ({"guidance": -1}, "guidance must be a number, 0 to 1000, not -1"),
    ({"guidance": math.nan}, "guidance"),
    ({"guidance": math.inf}, "guidance"),
    ({"guidance": "x"}, "guidance"),
    ({"true_cfg": math.nan}, "true_cfg"),
    ({"true_cfg": -2}, "true_cfg"),
    ({"true_cfg": 3}, "true_cfg needs a negative_prompt"),
    ({"true_cfg": 0.5}, "true_cfg needs a negative_prompt"),
    (
        {"true_cfg": 1, "negative_prompt": "a"},
        "true_cfg must be above 1 with a negative_prompt, not 1",
    ),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"previews": 17}, "previews must be a whole number, 0 to 16, not 17"),
    ({"negative_prompt": 5}, "negative_prompt"),
    ({"negative_prompt": "a" * 10**6}, "negative_prompt must have at most 65536 characters"),
    ({"negative_prompt": "\ud800"}, "negative_prompt must be valid Unicode"),
    ({"deadline": "soon"}, "deadline"),
    ({"max_new_tokens": 5}, "max_new_tokens"),
    ({"images": []}, "images"),
    ({"json_schema": "{}"}, "json_schema"),
    ({"size": 5}, "size"),
]


@pytest.mark.parametrize(("settings", "said"), WRONG, ids=lambda one: str(one)[:40])
def test_wrong_settings_are_named(dev, settings, said):
    with pytest.raises(InputError) as caught:
        wire(dev, **settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("prompt", ["", "  \n", "a" * 10**6, None, 5, ["a"], b"a", "\udfff"])
def test_wrong_prompts_are_named(dev, prompt):
    with pytest.raises(InputError, match=r"^prompt "):
        wire(dev, prompt)


def test_guidance_of_a_model_without_it(schnell):
    assert wire(schnell, guidance=0).guidance_scale == 0
    with pytest.raises(InputError, match="guidance has no effect: 'flux' was trained without it"):
        wire(schnell, guidance=3.5)


def test_defaults_of_z_image(turbo, base):
    fast, slow = wire(turbo), wire(base)
    assert (fast.num_inference_steps, fast.guidance_scale) == (8, 0.0)
    assert (slow.num_inference_steps, slow.guidance_scale) == (50, 4.0)
    assert fast.tokens_2 is fast.negative_tokens is fast.negative_tokens_2 is None
    empty = wire(base, negative_prompt="").negative_tokens
    assert slow.negative_tokens.array.tolist() == empty.array.tolist()
    assert slow.true_cfg_scale == 1.0


def test_a_prompt_of_z_image_is_a_message_of_a_user(turbo):
    tokenizer = turbo.pictures.tokenizer._tokenizer
    text = "<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(wire(turbo, "a cat").tokens.array, skip_special_tokens=False) == text
    assert len(wire(turbo, "a cat " * 1000).tokens.array) == 512


def test_limits_of_guidance_travel_as_named_arrays(base):
    sent = wire(base, negative_prompt="a dog", cfg_normalization=1, cfg_truncation=0.5)
    assert (sent.extra_params["cfg_normalization"], sent.extra_params["cfg_truncation"]) == (1, 0.5)
    assert sent.negative_tokens.array.tolist() != wire(base).negative_tokens.array.tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"true_cfg": 3.0}, "true_cfg has no effect: the negative prompt of 'zimage'"),
        ({"negative_prompt": "a"}, "negative_prompt has no effect without guidance"),
        ({"cfg_truncation": 0.5}, "cfg_truncation has no effect without guidance"),
        ({"guidance": 2, "cfg_truncation": 1.5}, "cfg_truncation must be a number, 0 to 1"),
        ({"guidance": 2, "cfg_normalization": -1}, "cfg_normalization must be a number"),
    ],
)
def test_settings_without_effect_on_z_image(turbo, settings, said):
    with pytest.raises(InputError) as caught:
        wire(turbo, **settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["cfg_normalization", "cfg_truncation"])
def test_limits_of_guidance_are_not_for_flux(dev, name):
    with pytest.raises(InputError, match=f"{name} has no effect: 'flux' has true_cfg"):
        wire(dev, **{name: 0.5})


def test_a_shift_that_is_no_number():
    with pytest.raises(CheckpointError, match="shift is no number"):
        wire(zimage_of({"shift": "much"}))


def test_callbacks_must_be_functions(dev):
    with pytest.raises(InputError, match="on_progress must be a function"):
        PictureJob(dev, "a", {}, 5)
    with pytest.raises(InputError, match="on_preview must be a function"):
        PictureJob(dev, "a", {}, None, 5)
    with pytest.raises(InputError, match="previews needs on_preview"):
        PictureJob(dev, "a", {"previews": 2})


def test_a_request_without_room(files):
    small = model_card(name="flux", vocab_size=1 << 16, max_length=300, task="draw",
                       kinds=["PixelContext"], layout=LAYOUT)  # fmt: skip
    with pytest.raises(InputError, match="positions of KV memory, limit 300"):
        wire(ServedModel(Description(small, "", files)))


def test_a_description_without_the_files_names_the_model():
    with pytest.raises(CheckpointError, match="/models/flux/tokenizer"):
        wire(ServedModel(Description(PAINTER, "/models/flux", {})))


def test_every_option_is_known():
    """No keyword argument of ``image`` is declared that is refused, except those of text."""
    own = PictureOptions.__annotations__.keys() - RequestOptions.__annotations__.keys()
    assert own == _CHECKS.keys()
    assert RequestOptions.__annotations__.keys() >= _OPTIONS


@pytest.mark.parametrize(
    "media", [None, b"", b"GIF89a" * 9, encode_png(np.zeros((16, 48, 3), np.uint8))]
)
def test_an_end_without_the_picture_is_an_error(dev, media):
    job = PictureJob(dev, "a", TINY)
    with pytest.raises(InternalError, match="no picture"):
        job.take(Ended(request_id="r", position=9, status="maximum_length", media=media))


# --------------------------------------------------------------------------- PNG


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 3), (3, 5, 4), (1, 1, 3)])
def test_png_files_are_read_back(shape):
    pixels = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    png = encode_png(pixels)
    assert np.array_equal(decode_png(png), pixels)
    assert png_size(png) == (shape[1], shape[0])


def broken():
    png = encode_png(np.zeros((4, 4, 3), np.uint8))
    filtered = zlib.compress(b"\2" + bytes(12) + bytes(3 * 13))
    yield "cut", png[:-12]
    yield "cut in the data", png[:50]
    yield "text", b"no picture" * 10
    yield "checksum", png[:-20] + bytes([png[-20] ^ 1]) + png[-19:]
    yield "depth", _changed(png, 24, 16)
    yield "interlaced", _changed(png, 28, 1)
    yield "huge", png[:16] + struct.pack(">II", 1 << 31, 1 << 31) + png[24:]
    yield "filtered", png[:33] + _chunk(b"IDAT", filtered) + _chunk(b"IEND", b"")
    yield "not zlib", png[:33] + _chunk(b"IDAT", b"xxxx") + _chunk(b"IEND", b"")
    yield "few pixels", png[:33] + _chunk(b"IDAT", zlib.compress(b"")) + _chunk(b"IEND", b"")


def _changed(png, at, value):
    return png[:at] + bytes([value]) + png[at + 1 :]


def _chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@pytest.mark.parametrize(("what", "png"), list(broken()), ids=lambda one: str(one)[:20])
def test_other_files_are_value_errors(what, png):
    with pytest.raises(ValueError, match="PNG"):
        Picture(png=png, width=4, height=4, seed=0, steps=1, request_id="r").pixels()
