"""Moves of KV blocks that must not be launched, and the numbers a launch is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.engine.kernels.cuda import blocks
from baton.engine.kernels.cuda.blocks import Layers, divisor
from baton.engine.kernels.cuda.device import Device

PAYLOAD = 2 * 3 * 2 * 3 * 8 * 16 * 2
"""Bytes of two layers of three blocks."""


def _arguments(device: Device) -> dict[str, Any]:
    return {
        "pool": device.zeros((4, 6, 2, 3, 8, 16), np.uint16),
        "ids": blocks.upload_ids(device, [5, 0, 2]),
        "layers": Layers(1, 2),
        "payload": device.zeros((PAYLOAD,), np.uint8),
        "digest": device.zeros((1,), np.uint64),
        "workspace": device.zeros((2,), np.uint64),
    }


def _refusals(device: Device) -> dict[str, tuple[str, dict[str, Any]]]:
    pool = (4, 6, 2, 3, 8, 16)
    strided = device.zeros((4, 6, 2, 3, 16, 16), np.uint16)[:, :, :, :, ::2]  # type: ignore[index]
    return {
        "pool dtype": ("uint16", {"pool": device.zeros(pool, np.float32)}),
        "pool strides": ("contiguous", {"pool": strided}),
        "pool axes": ("shape", {"pool": device.zeros(pool[1:], np.uint16)}),
        "pool sides": ("shape", {"pool": device.zeros((4, 6, 1, 3, 8, 16), np.uint16)}),
        "head size": ("eights", {"pool": device.zeros((4, 6, 2, 3, 8, 12), np.uint16)}),
        "id": ("block 6", {"ids": blocks.upload_ids(device, [5, 6, 2])}),
        "number of ids": ("payload has shape", {"ids": blocks.upload_ids(device, [5, 2])}),
        "payload dtype": ("uint8", {"payload": device.zeros((PAYLOAD,), np.int8)}),
        "payload size": ("shape", {"payload": device.zeros((PAYLOAD + 8,), np.uint8)}),
        "payload strides": ("contiguous", {"payload": device.zeros((2 * PAYLOAD,), np.uint8)[::2]}),  # type: ignore[index]
        "layers": ("layers 3 to 5", {"layers": Layers(3, 2)}),
        "layer -1": ("layers", {"layers": Layers(-1, 2)}),
        "no layers": ("layers", {"layers": Layers(1, 0)}),
        "digest": ("digest", {"digest": device.zeros((1,), np.int64)}),
        "digest size": ("digest", {"digest": device.zeros((2,), np.uint64)}),
        "workspace": ("workspace", {"workspace": device.zeros((1,), np.uint64)}),
    }


class NoLaunch:
    """A device on which a launch is a failure."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name == "launch":
            pytest.fail("launched")
        return getattr(self._device, name)


@pytest.mark.parametrize("move", [blocks.gather_blocks, blocks.scatter_blocks])
def test_wrong_arguments_never_reach_a_kernel(device: Device, move: Any) -> None:
    for name, (words, change) in _refusals(device).items():
        arguments = {**_arguments(device), **change}
        with pytest.raises(ValueError, match=words):
            move(NoLaunch(device), **arguments)
            pytest.fail(name)
    move(device, **_arguments(device))


def test_a_block_is_not_written_twice(device: Device) -> None:
    arguments = {**_arguments(device), "ids": blocks.upload_ids(device, [5, 2, 5])}
    with pytest.raises(ValueError, match="twice"):
        blocks.scatter_blocks(NoLaunch(device), **arguments)  # type: ignore[arg-type]
    blocks.gather_blocks(device, **arguments)


@pytest.mark.parametrize("ids", [[], [[1]], [-1], [2**31], [0.5], np.array([3, 2**40])], ids=str)
def test_ids_are_checked_before_they_travel(device: Device, ids: Any) -> None:
    with pytest.raises(ValueError, match="ids"):
        blocks.upload_ids(device, ids)


def test_divisions_are_exact(rng: np.random.Generator) -> None:
    """At the borders of each quotient, where a factor rounded the wrong way would show."""
    for by in [*range(2, 200), *rng.integers(200, 2**31, 200).tolist(), 2**31 - 1]:
        _, factor, shift = divisor(by)
        assert factor < 2**32
        borders = [by * q + r for q in (1, 2, (2**31 - 1) // by) for r in (-1, 0, 1)]
        numbers = [0, 2**31 - 1, *borders, *rng.integers(0, 2**31, 20).tolist()]
        for n in (n for n in numbers if 0 <= n < 2**31):
            assert (n * factor >> 32) >> shift == n // by, (n, by)


def test_wrong_copies_never_reach_a_kernel(device: Device) -> None:
    shape = (4, 6, 2, 3, 8, 16)

    def arguments() -> dict[str, Any]:
        return {
            "source": device.zeros(shape, np.uint16),
            "source_ids": blocks.upload_ids(device, [5, 0, 2]),
            "target": device.zeros((4, 9, 2, 3, 8, 16), np.uint16),
            "target_ids": blocks.upload_ids(device, [8, 1, 2]),
            "digest": device.zeros((1,), np.uint64),
            "workspace": device.zeros((2,), np.uint64),
            "layers": Layers(0, 2),
        }

    changes: list[tuple[str, dict[str, Any]]] = [
        ("float32", {"source": device.zeros(shape, np.float32)}),
        ("differ", {"target": device.zeros((4, 9, 2, 3, 16, 16), np.uint16)}),
        ("int8 and uint16", {"source": device.zeros(shape, np.int8)}),
        ("uint16 and int8", {"target": device.zeros((4, 9, 2, 3, 8, 16), np.int8)}),
        ("shape", {"target": device.zeros((9, 2, 3, 8, 16), np.uint16)}),
        ("block 6", {"source_ids": blocks.upload_ids(device, [6, 0, 2])}),
        ("block 9", {"target_ids": blocks.upload_ids(device, [9, 0, 2])}),
        ("fit", {"target_ids": blocks.upload_ids(device, [8, 0])}),
        ("twice", {"target_ids": blocks.upload_ids(device, [8, 0, 8])}),
        ("layers 3 to 5", {"layers": Layers(3, 2)}),
        ("layers", {"layers": Layers(0, 0)}),
        ("digest", {"digest": device.zeros((1,), np.float64)}),
        ("workspace", {"workspace": device.zeros((3,), np.uint64)}),
    ]
    for words, change in changes:
        with pytest.raises(ValueError, match=words):
            blocks.copy_blocks(NoLaunch(device), **{**arguments(), **change})  # type: ignore[arg-type]
            pytest.fail(words)
    blocks.copy_blocks(device, **arguments())
