"""Moves of KV blocks that must not be launched, and the numbers a launch is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.engine.kernels.cuda import blocks
from baton.engine.kernels.cuda.blocks import divisor
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.payload import PayloadLayout


def _arguments(device: Device, encoding: str = "bf16") -> dict[str, Any]:
    layout = PayloadLayout(2, 3, 2, 8, 16, encoding)
    return {
        "pool": device.zeros((4, 6, 2, 3, 8, 16), np.uint16),
        "ids": blocks.upload_ids(device, [5, 0, 2]),
        "layout": layout,
        "payload": device.zeros((layout.nbytes,), np.uint8),
        "digest": device.zeros((1,), np.uint64),
        "workspace": device.zeros((2,), np.uint64),
    }


def _refusals(device: Device) -> dict[str, tuple[str, dict[str, Any]]]:
    pool, payload = (4, 6, 2, 3, 8, 16), PayloadLayout(2, 3, 2, 8, 16).nbytes
    strided = device.zeros((4, 6, 2, 3, 16, 16), np.uint16)[:, :, :, :, ::2]  # type: ignore[index]
    sizes = {"layers": 2, "blocks": 3, "heads": 2, "block_size": 8, "head_dim": 16}

    def other(**changes: int) -> dict[str, Any]:
        layout = PayloadLayout(**{**sizes, **changes})
        return {"layout": layout, "payload": device.zeros((layout.nbytes,), np.uint8)}

    return {
        "pool dtype": ("uint16", {"pool": device.zeros(pool, np.float32)}),
        "pool strides": ("contiguous", {"pool": strided}),
        "pool axes": ("shape", {"pool": device.zeros(pool[1:], np.uint16)}),
        "pool sides": ("shape", {"pool": device.zeros((4, 6, 1, 3, 8, 16), np.uint16)}),
        "id": ("block 6", {"ids": blocks.upload_ids(device, [5, 6, 2])}),
        "number of ids": ("same request", {"ids": blocks.upload_ids(device, [5, 2])}),
        "more ids": ("same request", {"ids": blocks.upload_ids(device, [5, 2, 0, 1])}),
        "payload dtype": ("uint8", {"payload": device.zeros((payload,), np.int8)}),
        "payload size": ("shape", {"payload": device.zeros((payload + 8,), np.uint8)}),
        "payload strides": ("contiguous", {"payload": device.zeros((2 * payload,), np.uint8)[::2]}),  # type: ignore[index]
        "layers": ("layers 3 to 5", {"layer_start": 3}),
        "no layers": ("layers", {"layer_start": -1}),
        "heads": ("heads 2 to 4", {"head_start": 2}),
        "head size": ("head_dim", other(head_dim=24)),
        "block size": ("divide", other(block_size=12)),
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


def test_a_tile_too_large_for_a_thread_block_is_refused(device: Device) -> None:
    layout = PayloadLayout(1, 1, 1, 256, 136, "int8_head")
    arguments = {
        **_arguments(device),
        "pool": device.zeros((1, 1, 2, 1, 256, 136), np.uint16),
        "ids": blocks.upload_ids(device, [0]),
        "layout": layout,
        "payload": device.zeros((layout.nbytes,), np.uint8),
    }
    with pytest.raises(ValueError, match="share a scale"):
        blocks.gather_blocks(NoLaunch(device), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"heads": 0}, "empty"), ({"head_dim": 12}, "multiple"), ({"encoding": "fp4"}, "not one of")],
)
def test_layouts_are_checked(change: dict[str, Any], words: str) -> None:
    sizes = {"layers": 1, "blocks": 1, "heads": 1, "block_size": 8, "head_dim": 16}
    with pytest.raises(ValueError, match=words):
        PayloadLayout(**{**sizes, **change})


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
            "layer_count": 2,
        }

    changes: list[tuple[str, dict[str, Any]]] = [
        ("float32", {"source": device.zeros(shape, np.float32)}),
        ("differ", {"target": device.zeros((4, 9, 2, 3, 16, 16), np.uint16)}),
        ("shape", {"target": device.zeros((9, 2, 3, 8, 16), np.uint16)}),
        ("block 6", {"source_ids": blocks.upload_ids(device, [6, 0, 2])}),
        ("block 9", {"target_ids": blocks.upload_ids(device, [9, 0, 2])}),
        ("fit", {"target_ids": blocks.upload_ids(device, [8, 0])}),
        ("twice", {"target_ids": blocks.upload_ids(device, [8, 0, 8])}),
        ("layers 3 to 5", {"layer_start": 3}),
        ("layers", {"layer_count": 0}),
        ("digest", {"digest": device.zeros((1,), np.float64)}),
        ("workspace", {"workspace": device.zeros((3,), np.uint64)}),
    ]
    for words, change in changes:
        with pytest.raises(ValueError, match=words):
            blocks.copy_blocks(NoLaunch(device), **{**arguments(), **change})  # type: ignore[arg-type]
            pytest.fail(words)
    blocks.copy_blocks(device, **arguments())


def test_wrong_reslices_never_reach_a_kernel(device: Device) -> None:
    def arguments() -> dict[str, Any]:
        return {
            "source": device.zeros((4, 6, 2, 4, 8, 16), np.uint16),
            "source_ids": blocks.upload_ids(device, [5, 0, 2]),
            "target": device.zeros((4, 9, 2, 2, 16, 16), np.uint16),
            "target_ids": blocks.upload_ids(device, [8, 1]),
            "digest": device.zeros((1,), np.uint64),
            "workspace": device.zeros((2,), np.uint64),
            "layer_count": 2,
            "heads": 2,
        }

    changes: list[tuple[str, dict[str, Any]]] = [
        ("float32", {"source": device.zeros((4, 6, 2, 4, 8, 16), np.float32)}),
        ("head_dim", {"source": device.zeros((4, 6, 2, 4, 8, 24), np.uint16)}),
        ("divide", {"target": device.zeros((4, 9, 2, 2, 12, 16), np.uint16)}),
        ("block 6", {"source_ids": blocks.upload_ids(device, [6, 0, 2])}),
        ("block 9", {"target_ids": blocks.upload_ids(device, [9, 0])}),
        ("same request", {"target_ids": blocks.upload_ids(device, [8])}),
        ("twice", {"target_ids": blocks.upload_ids(device, [8, 8])}),
        ("heads 3 to 5", {"source_head": 3}),
        ("heads 1 to 3", {"target_head": 1}),
        ("layers 3 to 5", {"layer_start": 3}),
        ("empty", {"heads": 0}),
        ("digest", {"digest": device.zeros((1,), np.float64)}),
    ]
    for words, change in changes:
        with pytest.raises(ValueError, match=words):
            blocks.reslice_blocks(NoLaunch(device), **{**arguments(), **change})  # type: ignore[arg-type]
            pytest.fail(words)
    blocks.reslice_blocks(device, **arguments())
