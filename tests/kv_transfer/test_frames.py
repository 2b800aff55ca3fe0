from __future__ import annotations

import mmap
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend
from baton.kv_transfer.frames import BufferPool, FramePacker, FrameWriter
from baton.proto.wire.messages import GrantRef, KVFrame

sys.path.insert(0, str(Path(__file__).parent))
from helpers import LAYOUT


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def pools():
    rng = np.random.default_rng(3)
    shape = (LAYOUT.num_layers, 8, *LAYOUT.block_shape)
    return rng.standard_normal(shape).astype(np.float32), np.zeros(shape, np.float32)


def frame_of(nbytes: int) -> KVFrame:
    return KVFrame(GrantRef(1, 0, 0), 0, 0, 2, 1, 3, nbytes, 0)


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_packed_and_written_blocks_are_equal_under_other_block_ids(backend):
    kernels = load_backend(backend)
    source, target = pools()
    nbytes = 2 * 3 * LAYOUT.block_bytes
    buffer = np.empty(nbytes, np.uint8)
    mine, theirs = np.array([5, 2, 7, 0], np.int32), np.array([1, 4, 6], np.int32)
    frame = FramePacker(kernels, source).pack(frame_of(nbytes), mine, buffer)
    writer = FrameWriter(kernels, target)
    assert writer.write(frame, theirs, buffer)
    assert np.array_equal(target[:, theirs], source[:, mine[1:]])
    untouched = [i for i in range(8) if i not in theirs]
    assert not target[:, untouched].any()


@pytest.mark.parametrize("position", [0, 17, -1])
@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_one_damaged_byte_is_found(backend, position):
    kernels = load_backend(backend)
    source, target = pools()
    nbytes = 2 * 3 * LAYOUT.block_bytes
    buffer = np.empty(nbytes, np.uint8)
    frame = FramePacker(kernels, source).pack(
        frame_of(nbytes), np.array([5, 2, 7, 0], np.int32), buffer
    )
    buffer[position] ^= 1
    writer = FrameWriter(kernels, target)
    assert not writer.write(frame, np.array([1, 4, 6], np.int32), buffer)
    target[:] = 0
    assert not writer.write(frame, np.array([1, 4, 6], np.int32), buffer[:-4])
    assert not target.any()  # what does not fit is not written at all


def test_buffers_are_reused():
    pool = BufferPool()
    first = pool.take(100)
    pool.release(first)
    again = pool.take(99)  # of the same size class
    assert again.nbytes == 99 and np.shares_memory(again, first)
    pool.take(100)
    assert pool.allocated == 2


@pytest.mark.parametrize("unit", [1, 1000, 32 << 10])
def test_staging_memory_is_at_most_twice_what_was_in_flight_and_returns(unit):
    """Frames of any size in flight together: pooled by exact size, 96 MiB left 3.1 GiB."""
    random, pool, peak = Random(1), BufferPool(), 0
    for burst in range(2000):
        buffers = [pool.take(unit * random.randint(1, 64)) for _ in range(random.randint(1, 48))]
        peak = max(peak, pool.in_flight)
        assert pool.in_flight == sum(one.nbytes for one in buffers) <= pool.held <= 2 * peak
        random.shuffle(buffers)
        for buffer in buffers:
            pool.release(buffer)
            assert pool.held <= 2 * peak
        pool.age(100.0 + burst / 1000)
    assert pool.in_flight == 0 < pool.held
    for second in range(3):
        pool.age(200.0 + second)
    assert pool.held == 0


def test_a_smaller_traffic_keeps_less():
    pool = BufferPool()
    many = [pool.take(1 << 20) for _ in range(40)]
    for buffer in many:
        pool.release(buffer)
    for second in range(4):
        pool.age(50.0 + second)
        few = [pool.take(1 << 18) for _ in range(4)]
        for buffer in few:
            pool.release(buffer)
    assert 1 << 20 <= pool.held <= 2 << 20


def test_freed_buffers_return_to_the_system():
    """The C library's heap keeps freed megabytes, with the settings of the workers' processes."""
    pool = BufferPool()
    before = resident_bytes()
    buffers = [pool.take(1 << 20) for _ in range(64)]
    for buffer in buffers:
        buffer[:] = 1
    assert resident_bytes() - before > 48 << 20
    for buffer in buffers:
        pool.release(buffer)
    del buffers, buffer
    for second in range(3):
        pool.age(10.0 + second)
    assert resident_bytes() - before < 16 << 20


def test_neighbouring_blocks_of_one_layer_are_sent_from_the_pool_itself():
    kernels = load_backend("numpy")
    source, _ = pools()
    packer = FramePacker(kernels, source)
    one_layer = KVFrame(GrantRef(1, 0, 0), 0, 1, 1, 1, 3, 3 * LAYOUT.block_bytes, 0)
    table = np.array([7, 2, 3, 4], np.int32)
    frame, payload = packer.view(one_layer, table)
    assert np.shares_memory(payload, source)
    copied = np.empty(one_layer.nbytes, np.uint8)
    assert packer.pack(one_layer, table, copied) == frame
    assert np.array_equal(payload, copied)
    assert packer.view(one_layer, np.array([7, 2, 4, 3], np.int32)) is None
    assert packer.view(one_layer, np.array([7, 2, 4, 4], np.int32)) is None
    assert packer.view(frame_of(2 * 3 * LAYOUT.block_bytes), table) is None
