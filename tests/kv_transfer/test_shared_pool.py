"""A pool that another process reads: its content, and the checks of its description."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.engine.kernels.load import load_backend
from baton.engine.pipeline.model import make_pool
from baton.kv_transfer.frames import FramePacker, FrameWriter
from baton.kv_transfer.shared_pool import MappedPools, PoolOwner, can_share, map_pool, unmap
from baton.proto.layout import KV_TYPES
from baton.proto.wire.messages import GrantRef, KVFrame, PoolTicket

sys.path.insert(0, str(Path(__file__).parent))
from helpers import LAYOUT

pytestmark = pytest.mark.skipif(not can_share(), reason="no memory to share on this system")

BLOCKS = 8
OWNER = """
import sys, msgspec, numpy as np
sys.path.insert(0, sys.argv[1])
from baton.engine.pipeline.model import make_pool
from baton.kv_transfer.shared_pool import PoolOwner
from helpers import LAYOUT
owner = PoolOwner()
pool = make_pool(LAYOUT, 8, owner.allocate)
pool[:] = np.arange(pool.size, dtype=np.float32).reshape(pool.shape)
print(msgspec.json.encode(owner.ticket).decode(), flush=True)
sys.stdin.read()
"""


def filled() -> tuple[PoolOwner, np.ndarray]:
    owner = PoolOwner()
    pool = make_pool(LAYOUT, BLOCKS, owner.allocate)
    np.random.default_rng(5).standard_normal(out=pool, dtype=np.float32)
    return owner, pool


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_a_pool_of_any_type_is_mapped(dtype: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    owner = PoolOwner()
    pool = make_pool(layout, BLOCKS, owner.allocate)
    raw = pool.view(np.uint8).reshape(-1)
    raw[:] = np.random.default_rng(6).integers(0, 256, raw.size)
    mapped = map_pool(owner.ticket, layout)
    assert (mapped.shape, mapped.dtype) == (pool.shape, pool.dtype)
    assert mapped.tobytes() == pool.tobytes()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def at_most(seconds: int):
    """Raise TimeoutError out of a call that does not return."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def other_process():
    """A process that owns a pool of ascending numbers, and its ticket."""
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield child, msgspec.json.decode(child.stdout.readline(), type=PoolTicket)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def test_a_reader_sees_what_another_process_writes_and_keeps_it_when_that_is_killed(other_process):
    child, ticket = other_process
    pool = map_pool(ticket, LAYOUT)
    assert pool.shape == (LAYOUT.num_layers, BLOCKS, *LAYOUT.block_shape)
    assert np.array_equal(pool.ravel(), np.arange(pool.size, dtype=np.float32))
    with pytest.raises(ValueError, match="read-only"):
        pool[:] = 0
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert pool[-1, -1].ravel()[-1] == pool.size - 1
    with pytest.raises(OSError, match=str(ticket.pid)):
        map_pool(ticket, LAYOUT)


def test_a_reader_sees_later_writes():
    owner, pool = filled()
    mapped = map_pool(owner.ticket, LAYOUT)
    pool[0, 3] = 7.0
    assert (mapped[0, 3] == 7.0).all()
    assert pool.ctypes.data % 64 == 0


def test_nothing_is_believed_that_is_not_as_the_ticket_says():
    owner, pool = filled()
    ticket = owner.ticket
    replace = msgspec.structs.replace
    with pytest.raises(ValueError, match="owner's mark"):
        map_pool(replace(ticket, mark=b"x" * 16), LAYOUT)
    for nbytes in (0, 1, ticket.nbytes + 4):
        with pytest.raises(ValueError, match="multiple of block size"):
            map_pool(replace(ticket, nbytes=nbytes), LAYOUT)
    block = ticket.nbytes // BLOCKS
    for nbytes in (block, 9 * block, block << 30, 1 << 63):
        with pytest.raises(ValueError, match="differs from its ticket"):
            map_pool(replace(ticket, nbytes=nbytes), LAYOUT)
    with pytest.raises(OSError, match="fd"):
        map_pool(replace(ticket, fd=99_999), LAYOUT)
    open_end = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(open_end, ticket.nbytes + 4096)
        with pytest.raises(ValueError, match="could shrink"):
            map_pool(replace(ticket, fd=open_end), LAYOUT)
        with (
            Path("/dev/null").open("rb") as device,
            pytest.raises(ValueError, match="not name shared memory"),
        ):
            map_pool(replace(ticket, fd=device.fileno()), LAYOUT)
    finally:
        os.close(open_end)
    assert pool.any()


def test_a_ticket_that_names_a_pipe_does_not_make_the_reader_wait(tmp_path):
    """In another container the numbers may mean anything; opening this would wait for a writer."""
    owner, _pool = filled()
    os.mkfifo(tmp_path / "fifo")
    before = descriptors()
    pipe = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with at_most(10), pytest.raises(ValueError, match="does not name shared memory"):
            map_pool(msgspec.structs.replace(owner.ticket, fd=pipe), LAYOUT)
    finally:
        os.close(pipe)
    assert descriptors() == before


def test_memory_that_cannot_be_had_leaves_no_descriptor():
    before = descriptors()
    with pytest.raises((OSError, OverflowError)):
        PoolOwner().allocate(1 << 62)
    assert descriptors() == before


def test_a_connection_holds_one_pool_however_often_it_opens():
    owner, _pool = filled()
    maps, before = MappedPools(LAYOUT), descriptors()
    for incarnation in range(1, 20):
        assert maps.open(b"a/1", incarnation, owner.ticket) == ""
        assert maps.open(b"a/1", incarnation, owner.ticket) == ""
        assert len(maps) == 1 and maps.get(incarnation) is not None
    refused = msgspec.structs.replace(owner.ticket, pid=1 << 31)
    assert maps.open(b"a/1", 50, refused) != ""
    assert len(maps) == 0 and descriptors() == before
    maps.close(b"a/1")


def test_who_has_threads_may_unmap_on_another_one():
    """Freeing gigabytes takes longer than a step; the I/O thread does not wait."""
    owner, _pool = filled()
    released = []
    maps, before = MappedPools(LAYOUT, released.append), descriptors()
    assert maps.open(b"a/1", 5, owner.ticket) == ""
    assert maps.open(b"a/2", 5, owner.ticket) == ""
    maps.close(b"a/1")
    assert not released
    maps.close(b"a/2")
    (memory,) = released
    assert not memory.closed and descriptors() == before + 1
    unmap(memory)
    assert memory.closed and descriptors() == before


def test_a_pool_somebody_still_looks_at_stays_until_then():
    owner, pool = filled()
    maps, before = MappedPools(LAYOUT), descriptors()
    assert maps.open(b"a/1", 5, owner.ticket) == ""
    seen = maps.get(5)
    maps.close(b"a/1")
    assert seen is not None and np.array_equal(seen, pool)
    del seen
    assert descriptors() == before


def test_an_incarnation_has_one_pool_and_another_ticket_is_not_taken_for_it():
    first, _one = filled()
    second, _two = filled()
    maps = MappedPools(LAYOUT)
    assert maps.open(b"a/1", 5, first.ticket) == ""
    pool = maps.get(5)
    assert "another pool" in maps.open(b"b/1", 5, second.ticket)
    assert "another pool" in maps.open(b"a/1", 5, second.ticket)
    assert maps.get(5) is pool
    maps.close(b"b/1")
    assert maps.get(5) is pool
    maps.close(b"a/1")
    assert maps.open(b"b/2", 5, second.ticket) == "" and maps.get(5) is not pool


def test_the_last_connection_of_an_owner_takes_its_pool_along():
    owner, _pool = filled()
    maps, before = MappedPools(LAYOUT), descriptors()
    assert maps.open(b"a/1", 5, owner.ticket) == ""
    assert maps.open(b"a/2", 5, owner.ticket) == ""
    first = maps.get(5)
    assert first is not None and maps.get(6) is None
    maps.close(b"a/1")
    maps.close(b"nobody")
    assert maps.get(5) is first
    del first
    maps.close(b"a/2")
    assert maps.get(5) is None and len(maps) == 0
    assert descriptors() == before
    refused = msgspec.structs.replace(owner.ticket, pid=1 << 31)
    assert maps.open(b"b/1", 6, refused) != "" and len(maps) == 0


def test_the_memory_is_gone_with_its_last_reader():
    owner, pool = filled()
    link = f"/proc/self/fd/{owner.ticket.fd}"
    inode = Path(link).stat().st_ino
    mapped = map_pool(owner.ticket, LAYOUT)
    assert mapped.any()

    def maps() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:baton-kv" in line and f" {inode} " in line for line in lines)

    assert maps() >= 1
    os.close(owner.ticket.fd)
    del mapped, pool, owner
    gc.collect()
    assert maps() == 0


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_named_blocks_are_fetched_under_other_block_ids_and_checked(backend):
    kernels = load_backend(backend)
    owner, pool = filled()
    source = map_pool(owner.ticket, LAYOUT)
    target = np.zeros_like(pool)
    nbytes = 2 * 3 * LAYOUT.block_bytes
    frame = KVFrame(GrantRef(1, 0, 0), 0, 0, 2, 1, 3, nbytes, 0)
    mine, theirs = np.array([5, 2, 7, 0], np.int32), np.array([1, 4, 6], np.int32)
    packer, writer = FramePacker(kernels, pool), FrameWriter(kernels, target)
    named, payload = packer.name(frame, mine)
    assert named.shared
    assert named.checksum == packer.pack(frame, mine, np.empty(nbytes, np.uint8)).checksum
    assert writer.fetch(named, theirs, source, payload)
    assert np.array_equal(target[:2, theirs], pool[:2, mine[1:]])
    assert not target[:, [0, 2, 3, 5, 7]].any()

    def spoiled(**changes) -> bytes:
        ids = np.frombuffer(payload.tobytes(), np.int32).copy()
        for index, block in changes.items():
            ids[int(index[1:])] = block
        return ids.view(np.uint8)

    assert not writer.fetch(named, theirs, None, payload)
    assert not writer.fetch(named, theirs, source, payload[:-4])
    assert not writer.fetch(named, theirs, source, spoiled(i0=1))
    assert not writer.fetch(named, theirs, source, spoiled(i2=BLOCKS))
    assert not writer.fetch(named, theirs, source, spoiled(i2=-1))
    pool[1, 2, 0, 0, 0, 0] += 1  # overwritten before it was read
    assert not writer.fetch(named, theirs, source, payload)
