"""Memory of weights."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.engine.kernels.memory import CACHE_LINE, Arena, blocks_beside_widened, widened_bytes
from baton.proto.layout import KVLayout


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_pieces_are_zero_lie_side_by_side_and_start_on_cache_lines():
    arena = Arena()
    sizes = [64, 1, 200, 4096, 63, 0, 128]
    pieces = [arena.zeros(n) for n in sizes]
    assert [len(piece) for piece in pieces] == sizes
    assert all(address(piece) % CACHE_LINE == 0 for piece in pieces if len(piece))
    lines = np.cumsum([0, *[-(-n // CACHE_LINE) for n in sizes]])[:-1] * CACHE_LINE
    places = [address(piece) - address(pieces[0]) for piece in pieces]
    assert [p for p, n in zip(places, sizes, strict=True) if n] == [
        p for p, n in zip(lines, sizes, strict=True) if n
    ]
    for value, piece in enumerate(pieces):
        assert not piece.any()
        piece[:] = value + 1
    assert [set(piece.tolist()) for piece in pieces if len(piece)] == [{1}, {2}, {3}, {4}, {5}, {7}]


@pytest.mark.parametrize("more", [0, 1])
def test_what_does_not_fit_a_stretch_gets_its_own(more, monkeypatch):
    monkeypatch.setattr(Arena, "STRETCH", 1024)
    arena = Arena()
    first = arena.zeros(512)
    large = arena.zeros(1024 + more)
    assert len(large) == 1024 + more
    assert not large.any()
    large[:] = 1
    assert not first.any()
    assert not arena.zeros(100).any()


def test_a_pool_leaves_room_for_the_widened_blocks_of_its_longest_context():
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64, block_size=8, dtype="int8")
    block = 2 * layout.block_bytes
    assert widened_bytes(layout, 17) == 3 * 2 * 8 * 64 * 2
    assert widened_bytes(msgspec.structs.replace(layout, dtype="bfloat16"), 17) == 0
    for nbytes in range(block, 40 * block, 997):
        blocks = blocks_beside_widened(nbytes, layout, 100)

        def taken(count: int) -> int:
            return count * block + widened_bytes(layout, min(100, 8 * count))

        assert taken(blocks) <= nbytes < taken(blocks + 1)
