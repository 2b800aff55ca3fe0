"""What the router takes into account of each medium."""

from __future__ import annotations

import numpy as np
import pytest

from baton.proto.contexts.pixels import PixelContext, png_bytes
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.hashing import block_hashes
from baton.proto.layout import AudioCard, KVLayout, ModelCard
from baton.proto.limits import MAX_EMBEDDING_SIZE
from baton.proto.picture_requests import (
    encoder_tokens,
    state_length,
    state_parts,
    state_tokens,
    step_rows,
)
from baton.proto.vision_requests import spans_of
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.wire_context import (
    WireContext,
    WireImage,
    WireSampling,
    WireSpeechContext,
    WireTokens,
    WireVisionContext,
)
from baton.proto.work import PIECE_BYTES, Work, kv_positions, piece_bytes, prefix_hashes, work_of

TOKENS = WireTokens(np.arange(3, 43, dtype=np.int32))


CARD = ModelCard(
    name="m",
    architecture="LlamaForCausalLM",
    fingerprint="weights",
    numerics="cpu",
    vocab_size=1000,
    max_length=100,
    eos_token_ids=[2],
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16),
    audio=AudioCard(sample_rate=24000, frame_samples=2048, frame_tokens=7),
)


def text(kind=WireContext, new=7, **fields):
    return kind(tokens=TOKENS, max_length=100, sampling=WireSampling(max_new_tokens=new), **fields)


def seeing():
    images = [WireImage(4, 9, np.zeros((2, 3), np.float32), 5)]
    images.append(WireImage(20, 32, np.zeros((2, 3), np.float32), 6))
    return text(WireVisionContext, vision_token_ids=[4], images=images)


def picture(**fields):
    ids = TokenBuffer(np.arange(1, 6))
    return to_map(PixelContext(tokens=ids, tokens_2=ids, num_inference_steps=9, **fields))


@pytest.mark.parametrize(
    ("context", "work"),
    [
        (text(), Work(7)),
        (text(new=None), Work(60)),
        (text(new=500), Work(60)),
        (text(new=0), Work(0)),
        (text(task="embed"), Work(7, vector=True, result_bytes=4 * MAX_EMBEDDING_SIZE)),
        (text(WireSpeechContext), Work(7, pieces=True)),
        (seeing(), Work(7, encoded=17)),
    ],
)
def test_the_work_of_a_request(context, work):
    assert work_of(context) == work


def test_the_work_of_a_picture():
    context = picture(height=64, width=128)
    work = work_of(context)
    assert (work.rows, work.encoder) == (step_rows(context), encoder_tokens(context))
    assert (work.file, work.vector, work.pieces, work.encoded) == (True, False, False, 0)
    assert work.result_bytes == png_bytes(64, 128)
    previews = work_of(picture(height=64, width=128, extra_params={"previews": np.array([3])}))
    assert previews.result_bytes > work.result_bytes


def test_a_picture_keeps_the_parts_of_its_state_and_a_position_per_step():
    context = picture()
    work = work_of(context)
    for size in (16, 32):
        wanted = state_length(state_parts(context, size)) + 9 + 1
        assert kv_positions(context, work, size) == wanted
    assert kv_positions(text(), work_of(text()), 16) == 47


def test_pieces_are_charged_by_the_card():
    work = work_of(text(WireSpeechContext))
    assert piece_bytes(work, None) == 7 * PIECE_BYTES
    assert piece_bytes(work, CARD) == CARD.audio.nbytes(7)
    assert piece_bytes(work_of(text()), CARD) == 0


def test_hashes_depend_on_images_and_on_the_parts_of_a_picture():
    plain, images = text(), seeing()
    ids = TOKENS.array
    assert prefix_hashes(plain, 16, 64) == block_hashes(ids, 16, b"")
    assert prefix_hashes(plain, 16, 1) == block_hashes(ids[:16], 16, b"")
    seen = prefix_hashes(images, 16, 64)
    assert seen == block_hashes(ids, 16, b"", images=spans_of(images))
    assert seen != prefix_hashes(plain, 16, 64)
    drawn = picture()
    assert prefix_hashes(drawn, 16, 64) == block_hashes(state_tokens(drawn, 16)[: 16 * 64], 16, b"")
