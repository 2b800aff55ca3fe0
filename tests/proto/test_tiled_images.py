"""Images before the text: their tokens, which text sees them, and the check of requests."""

import numpy as np
import pytest
from msgspec.structs import replace

from baton.proto import InputError, SamplingParams, build_wire_context, check_wire_context
from baton.proto.contexts.images import image_hash
from baton.proto.contexts.tiled_images import (
    IDS,
    MASK,
    SeenImages,
    aspect_ratios,
    canvases_of,
    image_row,
    ratio_args,
)
from baton.proto.contexts.vision import context_rope_delta, seen_images
from baton.proto.ids import RequestID
from baton.proto.layout import KVLayout, ModelCard
from baton.proto.requests import check_continued, check_wire_shape
from baton.proto.vision_requests import check_hashes, committed, complete_images, with_images
from baton.proto.wire.context_maps import context_to_run, to_map
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import ClientToRouter, Submit
from baton.proto.wire.wire_context import WireImage

PAD, TILES = 98, 4
CARD = ModelCard(
    name="crosser", architecture="x", fingerprint="f", numerics="n", vocab_size=100, max_length=500,
    eos_token_ids=[2], layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4),
    kinds=["TextContext", "TextAndVisionContext"], image_positions=10,
    image_tiles=TILES,
)  # fmt: skip
TEXT = (5, PAD, 6, 7, PAD, 8)


def wire_images(spans, fill=7):
    pixels = [np.full((20 + i, 30, 3), fill, np.uint8) for i in range(len(spans))]
    return [WireImage(a, b, p, image_hash(p)) for (a, b), p in zip(spans, pixels, strict=True)]


def request(ids=(2, 3), text=TEXT, positions=10, block_size=4, change=None, **named):
    row, spans = image_row(ids, positions, block_size, PAD)
    tokens = np.concatenate([row, np.array(text, np.int32)])
    wire = build_wire_context(tokens, CARD, SamplingParams(seed=1))
    images = wire_images(spans)
    if change is not None:
        change(tokens, images)
        wire = build_wire_context(tokens, CARD, SamplingParams(seed=1))
    return with_images(wire, images, {**ratio_args(ids, TILES), **named}, PAD)


def test_the_ids_of_aspect_ratios_are_those_of_the_model():
    expected = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
    assert aspect_ratios(4) == expected
    assert aspect_ratios(1) == ((1, 1),)
    args = ratio_args([3, 1], 4)
    assert args[IDS].tolist() == [[3, 1]]
    assert args[MASK].tolist() == [[[1, 1, 1, 0], [1, 0, 0, 0]]]


@pytest.mark.parametrize(("positions", "block_size"), [(1, 1), (1, 4), (10, 4), (12, 4), (13, 4)])
def test_an_image_has_whole_blocks_after_its_aspect_ratio(positions, block_size):
    row, spans = image_row([5, 6, 7], positions, block_size, PAD)
    length = len(row) // 3
    assert length % block_size == 0
    assert positions <= length < max(positions, 2) + block_size
    assert row[::length].tolist() == [5, 6, 7]
    for number, (start, end) in enumerate(spans):
        assert (start - 1, end) == (number * length, (number + 1) * length)
        assert (row[start:end] == PAD).all()


def test_text_sees_the_images_of_the_last_group_before_it():
    """Images at 12, 13 and 16 of the text that begins at 10; each group until the next one."""
    seen = SeenImages(10, ((0, 4), (4, 8), (8, 10)), ((1, 1),) * 3, (12, 13, 16))
    assert [seen.visible(at) for at in range(10, 19)] == [
        (0, 0), (0, 0), (0, 1), (0, 2), (0, 2), (0, 2), (2, 3), (2, 3), (2, 3),
    ]  # fmt: skip


def test_a_request_passes_all_checks_and_the_wire():
    wire = request()
    check_wire_context(wire, CARD)
    check_wire_shape(wire)
    check_hashes(wire)
    frames = EnvelopeEncoder().encode([Submit(request_id="r", context=wire)])
    (received,) = EnvelopeDecoder(ClientToRouter).decode(frames)
    assert received.context == wire
    check_wire_context(received.context, CARD)
    pixels = sum(image.pixel_values.nbytes for image in wire.images)
    assert sum(len(frame) for frame in frames) < pixels + 2000


def test_the_context_of_a_request_knows_its_images():
    context = context_to_run(request(), RequestID("r"))
    seen = seen_images(context)
    assert (seen.end, seen.ranges) == (24, ((0, 12), (12, 24)))
    assert (seen.canvases, seen.places) == (((1, 2), (1, 3)), (25, 28))
    assert context_rope_delta(context) == -24


def test_a_committed_request_has_the_delta_and_no_pixels():
    context = context_to_run(request(), RequestID("r"))
    context.update(9)
    sent = committed(to_map(context), -24)
    assert not any(image.pixel_values.size for image in sent.images)
    check_continued(sent, CARD)
    again = context_to_run(sent, RequestID("r"))
    assert context_rope_delta(again) == -24
    assert seen_images(again) == seen_images(context)
    wrong = dict(sent.extra_model_args)
    del wrong[MASK]
    with pytest.raises(InputError, match=MASK):
        check_continued(replace(sent, extra_model_args=wrong), CARD)


def _at(index, token):
    return lambda tokens, images: tokens.__setitem__(index, token)


def _image(number, **fields):
    return lambda tokens, images: images.__setitem__(number, replace(images[number], **fields))


GOOD = ratio_args((2, 3), TILES)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"change": _at(0, 3)}, "aspect ratio id"),
        ({"change": _at(5, 3)}, "is not 98"),
        ({"change": _at(25, 3)}, "1 image tokens for 2"),
        ({"change": _at(26, PAD)}, "3 image tokens for 2"),
        ({"text": (5, PAD)}, "1 image tokens for 2"),
        ({"change": _image(0, start_idx=2)}, "begin the prompt"),
        ({"change": _image(1, end_idx=23)}, "equally long"),
        ({"change": _image(0, image_hash=None)}, "image_hash"),
        ({"change": _image(0, pixel_values=np.zeros((4, 4), np.uint8))}, "uint8"),
        ({"change": _image(0, pixel_values=np.zeros((4, 4, 3), np.float32))}, "uint8"),
        ({IDS: GOOD[IDS] * 0}, "0 for image 0"),
        ({IDS: GOOD[IDS] + 7}, "9 for image 0"),
        ({IDS: GOOD[IDS][:, :1]}, "must be integers"),
        ({IDS: GOOD[IDS][0, 0].reshape(())}, "must be integers"),
        ({MASK: GOOD[MASK][0, 0, 0].reshape(())}, "must be integers"),
        ({name: array[:, :1] for name, array in GOOD.items()}, "must be integers"),
        ({IDS: GOOD[IDS].astype(np.int64)}, "must be int32"),
        ({MASK: 1 - GOOD[MASK]}, "does not fit"),
        ({MASK: GOOD[MASK][..., :0]}, "0 tiles"),
        ({MASK: np.zeros((1, 2, 65), np.int32)}, "65 tiles"),
        ({"image_grid_thw": np.ones((2, 3), np.int32)}, "extra_model_args"),
        ({"ids": (), "text": (5, 6)}, "without images"),
    ],
)
def test_a_contradiction_is_refused(changed, message):
    with pytest.raises(InputError, match=message):
        request(**changed)


def test_many_ids_are_refused_before_they_are_read():
    """A router has one thread; a loop over the ids would stop it for seconds."""

    class Unread(np.ndarray):
        def tolist(self):
            raise AssertionError("read")

    many = np.ones((1, 100), np.int32)
    with pytest.raises(InputError, match="must be integers"):
        canvases_of(many.view(Unread), many[..., None], 2)


def test_the_model_decides_where_images_are():
    with pytest.raises(InputError, match="19 tokens, not 11"):
        check_wire_context(request(positions=20), CARD)
    with pytest.raises(InputError, match="15 tokens, not 11"):
        check_wire_context(request(block_size=16), CARD)
    with pytest.raises(InputError, match="image_grid_thw"):
        check_wire_context(request(), replace(CARD, image_positions=0))


def test_the_mask_has_as_many_tiles_as_the_model():
    """An id means another canvas among other tiles, but blocks are cached under the id."""
    fewer = {MASK: ratio_args((2, 3), 3)[MASK]}
    with pytest.raises(InputError, match="3 tiles, the model 4"):
        check_wire_context(request(**fewer), CARD)
    check_wire_context(request(**fewer), replace(CARD, image_tiles=0))  # of an older worker


def test_a_users_own_context_gets_hashes_and_narrow_arrays():
    wire = request()
    wide = {name: array.astype(np.int64) for name, array in wire.extra_model_args.items()}
    images = [replace(image, image_hash=None) for image in wire.images]
    assert complete_images(replace(wire, images=images, extra_model_args=wide)) == wire
