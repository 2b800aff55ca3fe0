"""A peer's description of its memory is compared with the driver's."""

from __future__ import annotations

import pytest

from baton.engine.kernels.cuda.driver import address_range, check_allocation
from baton.engine.kernels.cuda.gpus import described


@pytest.mark.parametrize(
    ("pointer", "needed", "fits"),
    [(1000, 500, True), (1000, 501, False), (1200, 300, True), (1200, 301, False)],
)
def test_only_what_lies_in_the_allocation_is_read(pointer: int, needed: int, fits: bool) -> None:
    asked = []

    def ask(address: int) -> tuple[int, int]:
        asked.append(address)
        return 1000, 500

    if fits:
        check_allocation(pointer, needed, ask)
    else:
        with pytest.raises(ValueError, match=f"has {1500 - pointer} bytes, its ticket says"):
            check_allocation(pointer, needed, ask)
    assert asked == [pointer]


def test_without_a_driver_nothing_is_believed() -> None:
    try:
        address_range(0)
    except OSError:
        return
    pytest.fail("an address of nobody has an allocation")


def test_the_driver_is_asked_for_a_uuid_that_cupy_cut_at_a_zero_byte() -> None:
    whole = bytes([7, 0, *range(14)])
    asked = []

    def ask(ordinal: int) -> bytes:
        asked.append(ordinal)
        return whole

    cut = described(3, {"name": b"NVIDIA H200", "uuid": whole[:1]}, ask)
    assert (cut.ordinal, cut.uuid) == (3, "GPU-07000001-0203-0405-0607-08090a0b0c0d")
    assert asked == [3]
    complete = described(0, {"name": b"NVIDIA H200", "uuid": bytes(range(1, 17))}, ask)
    assert complete.uuid == "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"
    assert asked == [3]
