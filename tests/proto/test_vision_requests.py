"""The check of requests with images: reads shapes, never pixels."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.proto import InputError, SamplingParams, build_wire_context, check_wire_context
from baton.proto.contexts.images import image_hash
from baton.proto.hashing import block_hashes
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.requests import check_continued, check_wire_shape
from baton.proto.vision_requests import (
    check_hashes,
    check_images,
    committed,
    complete_images,
    spans_of,
    with_images,
)
from baton.proto.wire.context_maps import context_to_run, grown_map, request_map, to_map
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import ClientToRouter, Submit
from baton.proto.wire.wire_context import WireImage, WireVisionContext
from baton.router.admission import context_bytes

PAD = 98
CARD = ModelCard(
    name="seer", architecture="x", fingerprint="f", numerics="n", vocab_size=100, max_length=500,
    eos_token_ids=[2], layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4),
    kinds=["TextContext", "TextAndVisionContext"],
)  # fmt: skip


def image(start, rows=4, columns=6, fill=7):
    pixels = np.full((rows * 14, columns * 14, 3), fill, np.uint8)
    return WireImage(start, start + rows * columns // 4, pixels, image_hash(pixels))


def tokens(*images, length=40):
    ids = np.arange(length, dtype=np.int32)
    for one in images:
        ids[one.start_idx : one.end_idx] = PAD
    return ids


def request(*images, grids=None, length=40):
    images = images or (image(3), image(12, 4, 4, 9))
    wire = build_wire_context(tokens(*images, length=length) % 100, CARD, SamplingParams(seed=1))
    found = [
        [1, one.pixel_values.shape[0] // 14, one.pixel_values.shape[1] // 14] for one in images
    ]
    grids = np.array(found if grids is None else grids, np.int32)
    return with_images(wire, images, {"image_grid_thw": grids}, PAD)


def test_a_request_passes_all_checks_and_the_wire():
    wire = request()
    check_wire_context(wire, CARD)
    check_wire_shape(wire)
    check_hashes(wire)
    message = Submit(request_id="r", context=wire)
    frames = EnvelopeEncoder().encode([message])
    assert len(frames) == 3  # pixels travel as separate frames
    (received,) = EnvelopeDecoder(ClientToRouter).decode(frames)
    assert received.context == wire
    check_wire_context(received.context, CARD)
    context = context_to_run(received.context)
    assert [one.start_idx for one in context.images] == [3, 12]
    assert request_map(context).images[0].image_hash == wire.images[0].image_hash


def test_the_bytes_on_the_wire_are_the_pixels_and_little_more():
    wire = request(image(3, 32, 32), length=300)
    size = sum(map(len, EnvelopeEncoder().encode([Submit(request_id="r", context=wire)])))
    assert size <= 448 * 448 * 3 + 2000


def changed_image(**fields):
    wire = request()
    return replace(wire, images=[replace(wire.images[0], **fields), wire.images[1]])


def changed_grid(*grid):
    wire = request()
    grids = wire.extra_model_args["image_grid_thw"].copy()
    grids[0] = grid
    return replace(wire, extra_model_args={"image_grid_thw": grids})


def wrong_tokens():
    wire = request()
    ids = wire.tokens.array.copy()
    ids[4] = 1
    return replace(wire, tokens=replace(wire.tokens, array=ids))


PIXELS = image(3).pixel_values
WRONG = {
    "float pixels": lambda: changed_image(pixel_values=PIXELS.astype(np.float32)),
    "two dimensions": lambda: changed_image(pixel_values=PIXELS[:, :, 0]),
    "four channels": lambda: changed_image(pixel_values=np.zeros((56, 84, 4), np.uint8)),
    "no pixels": lambda: changed_image(pixel_values=np.zeros((0, 0, 3), np.uint8)),
    "other size": lambda: changed_image(pixel_values=np.zeros((57, 84, 3), np.uint8)),
    "turned": lambda: changed_image(pixel_values=np.zeros((84, 56, 3), np.uint8)),
    "no hash": lambda: changed_image(image_hash=None),
    "huge hash": lambda: changed_image(image_hash=1 << 64),
    "negative hash": lambda: changed_image(image_hash=-1),
    "range before": lambda: changed_image(start_idx=2),
    "empty range": lambda: changed_image(end_idx=3),
    "range after the end": lambda: changed_image(end_idx=99),
    "touching": lambda: request(image(3), image(9, 4, 4)),
    "overlapping": lambda: request(image(3), image(8, 4, 4)),
    "not sorted": lambda: request(image(12), image(3, 4, 4)),
    "other token": wrong_tokens,
    "time": lambda: changed_grid(2, 4, 6),
    "transposed grid": lambda: changed_grid(1, 6, 4),
    "grid of zeros": lambda: changed_grid(1, 0, 0),
    "negative grid": lambda: changed_grid(1, -4, -6),
    "odd grid": lambda: changed_grid(1, 8, 3),
    "huge grid": lambda: changed_grid(1, 1 << 30, 6),
    "grid of int64": lambda: replace(
        request(), extra_model_args={"image_grid_thw": np.zeros((2, 3), np.int64)}
    ),
    "grids missing": lambda: replace(request(), extra_model_args={}),
    "one grid": lambda: request(grids=[[1, 4, 6]]),
    "more arguments": lambda: replace(
        request(), extra_model_args={**request().extra_model_args, "rope_delta": np.zeros(1)}
    ),
    "two placeholders": lambda: replace(request(), vision_token_ids=[PAD, 5]),
    "old pixels": lambda: replace(request(), pixel_values=[PIXELS]),
    "embeddings": lambda: replace(request(), task="embed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_agree_is_refused(name):
    for check in (lambda wire: check_wire_context(wire, CARD), check_wire_shape):
        with pytest.raises(InputError):
            check(WRONG[name]())


def test_limits(monkeypatch):
    from baton.proto import vision_requests

    monkeypatch.setattr(vision_requests, "MAX_REQUEST_IMAGES", 1)
    with pytest.raises(InputError, match="2 images, at most 1"):
        request()
    monkeypatch.setattr(vision_requests, "MAX_PIXEL_BYTES", 1000)
    with pytest.raises(InputError, match="limit 1000"):
        request(image(3))


def test_a_wrong_hash_is_found():
    check_images(changed_image(image_hash=5))  # the router does not read pixels
    with pytest.raises(InputError, match=r"images\[0\].image_hash"):
        check_hashes(changed_image(image_hash=5))


def after_prefill(**named):
    context = context_to_run(request())
    context.update(11)
    wire = committed(to_map(context), -3)
    return replace(wire, extra_model_args={**wire.extra_model_args, **named})


def test_a_committed_context_has_no_pixels_but_everything_else():
    wire = after_prefill()
    check_continued(wire, CARD)
    assert sum(one.pixel_values.nbytes for one in wire.images) == 0
    assert [one.image_hash for one in wire.images] == [one.image_hash for one in request().images]
    context = context_to_run(wire)
    before = context_to_run(request())
    assert context.prefix_keys(4, b"salt")[:10] == before.prefix_keys(4, b"salt")
    for wrong in (np.zeros(2, np.int32), np.zeros(1, np.int64)):
        with pytest.raises(InputError, match="rope_delta"):
            check_continued(after_prefill(rope_delta=wrong), CARD)
    with pytest.raises(InputError, match="extra_model_args"):
        check_continued(grown_map(request(), [5]), CARD)


def test_a_users_context_gets_its_hashes():
    wire = request()
    grids = wire.extra_model_args["image_grid_thw"]
    bare = replace(
        wire,
        images=[replace(one, image_hash=None) for one in wire.images],
        extra_model_args={"image_grid_thw": grids.astype(np.int64)},
    )
    assert complete_images(bare) == wire
    text = build_wire_context([1, 2], CARD, SamplingParams())
    assert complete_images(text) is text


def test_the_router_counts_the_bytes_of_images():
    wire = request(image(3, 32, 32), length=300)
    frames = EnvelopeEncoder().encode([Submit(request_id="r", context=wire)])
    (received,) = EnvelopeDecoder(ClientToRouter).decode(frames)
    assert context_bytes(received.context) >= 448 * 448 * 3 + len(frames[0])
    text = build_wire_context(range(20, 80), CARD, SamplingParams())
    assert context_bytes(text) < 10_000


def test_a_text_request_keeps_its_map():
    wire = build_wire_context([1, 2], CARD, SamplingParams())
    assert committed(wire, 0) is wire
    assert type(committed(request(), 0)) is WireVisionContext


def test_block_hashes_of_the_map_differ_by_image():
    one, other = request(), request(image(3, fill=8), image(12, 4, 4, 9))
    first, second = (
        block_hashes(wire.tokens.array, 4, b"", images=spans_of(wire)) for wire in (one, other)
    )
    assert one.tokens == other.tokens
    assert first[0] != second[0]
    assert spans_of(build_wire_context([1], CARD, SamplingParams())) == []


# --------------------------------------------------------------------------- any fields

COUNTS = st.integers(-2, 60) | st.sampled_from([1 << 31, 1 << 40, (1 << 53) - 1])
SHAPES = st.lists(st.integers(0, 9), max_size=4)
KINDS = st.sampled_from(["u1", "<i4", ">i4", "<i8", "<f4", "?", "<f8", "<u2"])


@st.composite
def arrays(draw, shapes=SHAPES):
    shape, kind = draw(shapes), draw(KINDS)
    return np.full(shape, draw(st.integers(0, 4)), kind)


GRIDS_OF_ANY_FORM = arrays(st.sampled_from([[2, 3], [1, 3], [0, 3], [3], [], [2, 2], [0]]))


@given(
    ranges=st.lists(st.tuples(COUNTS, COUNTS), max_size=4),
    pixels=arrays(),
    digest=st.none() | st.integers(-(1 << 63), (1 << 64) - 1),
    named=st.dictionaries(
        st.sampled_from(["image_grid_thw", "rope_delta", "x"]), GRIDS_OF_ANY_FORM, max_size=3
    ),
    ids=st.lists(st.integers(-5, 99), max_size=2),
    ending=st.booleans(),
)
def test_any_fields_are_accepted_or_one_input_error(ranges, pixels, digest, named, ids, ending):
    wire = replace(
        request(),
        images=[WireImage(first, last, pixels, digest) for first, last in ranges],
        extra_model_args=named,
        vision_token_ids=ids,
    )
    checks = [lambda: check_images(wire, committed=ending), lambda: check_wire_shape(wire)]
    for check in [*checks, lambda: check_continued(wire, CARD), lambda: check_hashes(wire)]:
        with contextlib.suppress(InputError):
            check()
