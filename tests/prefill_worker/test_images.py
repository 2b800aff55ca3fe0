"""Images on the core of a prefill worker: their hashes are checked before blocks are looked up."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from baton.prefill_worker.events import CheckImages, ImagesChecked
from baton.proto.contexts.images import image_hash
from baton.proto.errors import InputError
from baton.proto.requests import build_wire_context
from baton.proto.sampling import SamplingParams
from baton.proto.vision_requests import check_hashes, with_images
from baton.proto.wire.messages import Abort, Aborted, Accepted, Reserve, Terminal
from baton.proto.wire.wire_context import WireImage

from ..model_cards import model_card
from . import test_core as core
from .test_core import KEY, LAYOUT, Bench

CARD = model_card(
    architecture="Qwen2_5_VLForConditionalGeneration", max_length=200, layout=LAYOUT,
    kinds=["TextContext", "TextAndVisionContext"],
)  # fmt: skip
PAD = 90


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(core, "CARD", CARD)
    return Bench()


def seen(**fields):
    """A prompt of 12 tokens, of which 4 stand for an image of 56 x 56 pixels."""
    pixels = np.full((56, 56, 3), 7, np.uint8)
    image = replace(WireImage(3, 7, pixels, image_hash(pixels)), **fields)
    tokens = np.arange(12)
    tokens[3:7] = PAD
    wire = build_wire_context(tokens, CARD, SamplingParams(seed=1))
    grids = np.array([[1, 4, 4]], np.int32)
    return with_images(wire, [image], {"image_grid_thw": grids}, PAD)


def test_nothing_is_reserved_before_the_hashes_are_checked(bench):
    bench.open()
    bench.assign(context=seen())
    assert bench.one(Accepted).attempt == 1
    (wanted,) = bench.did(CheckImages)
    check_hashes(wanted.context)
    bench.later(1.0)
    assert not bench.to_peer(Reserve)
    bench.feed(ImagesChecked(wanted.key, None))
    bench.open()
    (reserve,) = bench.to_peer(Reserve)
    assert len(reserve.hashes) == 12 // LAYOUT.block_size


def test_a_wrong_hash_ends_the_request_before_any_block_is_found(bench):
    bench.open()
    bench.assign(context=seen(image_hash=5))
    (wanted,) = bench.did(CheckImages)
    with pytest.raises(InputError, match="not the hash of its pixels") as caught:
        check_hashes(wanted.context)
    bench.feed(ImagesChecked(wanted.key, caught.value))
    terminal = bench.one(Terminal)
    assert (terminal.code, terminal.message) == ("input", str(caught.value))
    bench.open()
    assert not bench.to_peer(Reserve)
    bench.feed(ImagesChecked(wanted.key, None))  # too late
    assert not bench.to_peer(Reserve)


def test_an_abort_while_the_hashes_are_checked(bench):
    bench.assign(context=seen())
    (wanted,) = bench.did(CheckImages)
    bench.hear(Abort(request=KEY, attempt=1))
    assert bench.one(Aborted).attempt == 1
    bench.feed(ImagesChecked(wanted.key, None))
    bench.assert_empty()


def test_text_is_not_checked(bench):
    bench.assign()
    assert not bench.did(CheckImages)
