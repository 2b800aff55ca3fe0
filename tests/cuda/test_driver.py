"""A peer's description of its memory is compared with the driver's."""

from __future__ import annotations

import pytest

from baton.engine.kernels.cuda.cupy_device import address_range, check_allocation


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
