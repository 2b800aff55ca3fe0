"""Frames between pools whose blocks differ in size or type, from the pool to the pool."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest

from baton.engine.kernels.kv_rows import opened, stored
from baton.engine.kernels.load import load_backend
from baton.engine.pipeline.model import make_pool
from baton.kv_transfer.frames import FramePacker, FrameWriter
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_grants import ReceiverConfig, Reply
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import Granted, SenderConfig, SendFrame
from baton.proto.errors import ProtocolError
from baton.proto.layout import KV_TYPES, KVLayout, frame_layout, layout_mismatch
from baton.proto.wire.messages import Grant, Reserve

TOKENS, LAYERS, HEADS, DIM = 50, 3, 2, 12


def layout(dtype: str, block_size: int) -> KVLayout:
    return KVLayout(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_size=block_size, dtype=dtype
    )


@pytest.fixture
def rng(request):
    """Other numbers in each run, except that a failed run can be repeated with its seed."""
    seed = int(np.random.SeedSequence().entropy) % 2**32
    request.node.add_report_section("setup", "seed", str(seed))
    return np.random.default_rng(seed)


class Store:
    """A decode worker's pool, whose blocks are given in a random order."""

    def __init__(self, rng, own: KVLayout, cached: int) -> None:
        self._ids = rng.permutation(64).astype(np.int32)
        self._size, self._cached = own.block_size, cached

    def reserve(self, hashes, num_tokens, growth, key):
        self.block_table = self._ids[: -(-(num_tokens + growth) // self._size)]
        self.cached_blocks = self._cached
        return self

    def free(self, allocation):
        pass


def rows_of(pool, table, token):
    block, offset = table[token // pool.shape[4]], token % pool.shape[4]
    return opened(pool[:, block, :, :, offset])


@pytest.mark.parametrize("cached", [0, 1])
@pytest.mark.parametrize("sizes", [(16, 16), (16, 6), (4, 16), (5, 1)], ids=str)
@pytest.mark.parametrize("types", list(product(KV_TYPES, KV_TYPES)), ids="-".join)
def test_every_token_arrives_through_sender_and_receiver(rng, types, sizes, cached):
    """A prompt in two chunks of layers, through cores and kernels, with small frames."""
    mine, theirs = (layout(*pair) for pair in zip(types, sizes, strict=True))
    frames = frame_layout(mine, theirs)
    kernels = load_backend("auto")
    source, target = make_pool(mine, 64), make_pool(theirs, 64)
    given = rng.standard_normal((*source.shape[:5], DIM), dtype=np.float32)
    source[:] = stored(opened(stored(given, "int8")), mine.dtype)
    table = rng.permutation(64)[: mine.blocks_for(TOKENS)].astype(np.int32)
    store = Store(rng, theirs, cached)
    receiver = Receiver(1, theirs, store, ReceiverConfig())
    sender = Sender(2, mine, SenderConfig(frame_bytes=3 * frames.block_bytes))
    reserve = Reserve(
        request=b"r", attempt=1, incarnation=2, hashes=[], num_tokens=TOKENS, growth=3,
        deadline=60.0,
    )  # fmt: skip
    sender.start("d", 0, reserve, 0.0, layout=frames)
    wire = frames if frames != theirs else None
    (reply,) = receiver.on_reserve(b"p", reserve, 0.0, layout=wire)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Grant)
    (granted,) = sender.on_grant("d", reply.message, 0.0)
    assert isinstance(granted, Granted)
    packer, writer = FramePacker(kernels, source), FrameWriter(kernels, target)
    differs = mine if mine != frames else None
    total = 0
    steps = [(1, 23, False), (LAYERS, 23, False), (1, TOKENS, True), (LAYERS, TOKENS, True)]
    for layer_end, token_end, last in steps:
        outputs = sender.ready(
            (b"r", 1), layer_end=layer_end, token_end=token_end, last=last, now=0.0
        )
        for output in outputs:
            assert isinstance(output, SendFrame)
            payload = np.empty(output.frame.nbytes, np.uint8)
            frame = packer.pack(output.frame, table, payload, frames if differs else None)
            total += frame.nbytes
            blocks = receiver.data.locate(frame)
            damaged = payload.copy()
            damaged[0] ^= 1
            assert not writer.write(frame, blocks, damaged, wire)
            assert writer.write(frame, blocks, payload, receiver.layout_of(frame.grant))
            receiver.data.on_frame(frame, intact=True, now=0.0)
    blocks = theirs.blocks_for(TOKENS) - cached
    assert total == blocks * LAYERS * frames.block_bytes, "the narrower type travels, once"
    for token in range(cached * theirs.block_size, TOKENS):
        found = rows_of(target, store.block_table, token)
        assert np.array_equal(found, rows_of(source, table, token)), token
    assert not target[:, store.block_table[:cached]].any()


def test_frames_have_the_receivers_blocks_and_the_narrower_type():
    for one, other in product(KV_TYPES, KV_TYPES):
        frames = frame_layout(layout(one, 16), layout(other, 6))
        narrower = max(one, other, key=KV_TYPES.index)
        assert (frames.block_size, frames.dtype) == (6, narrower)
        assert frames.block_bytes == min(layout(one, 6).block_bytes, layout(other, 6).block_bytes)


def test_a_frame_of_the_wrong_type_is_refused(rng):
    own, narrow = layout("bfloat16", 16), layout("int8", 16)
    receiver = Receiver(1, own, Store(rng, own, 0), ReceiverConfig())
    reserve = Reserve(
        request=b"r", attempt=1, incarnation=2, hashes=[], num_tokens=16, growth=0, deadline=9.0
    )
    (reply,) = receiver.on_reserve(b"p", reserve, 0.0, layout=narrow)
    assert reply.message.credit <= LAYERS * narrow.block_bytes
    sender = Sender(2, own, SenderConfig())
    sender.start("d", 0, reserve, 0.0)
    sender.on_grant("d", msgspec.structs.replace(reply.message, credit=1 << 20), 0.0)
    (output,) = sender.ready((b"r", 1), layer_end=LAYERS, token_end=16, last=True, now=0.0)
    with pytest.raises(ProtocolError, match="do not fit its shape"):
        receiver.data.locate(output.frame)


def test_layouts_that_no_conversion_joins():
    own = layout("bfloat16", 16)
    assert layout_mismatch(own, layout("int8", 5), converts=True) is None
    assert layout_mismatch(own, layout("bfloat16", 5), converts=False)[0] == "layout.block_size"
    assert layout_mismatch(own, layout("int8", 16), converts=False)[0] == "layout.dtype"
    assert layout_mismatch(own, layout("float16", 16), converts=True)[0] == "layout.dtype"
    other = msgspec.structs.replace(own, num_kv_heads=HEADS + 1)
    assert layout_mismatch(own, other, converts=True)[0] == "layout.num_kv_heads"
