"""Captured launches: the same kernels over the same arrays, with what the arrays hold by then."""

import numpy as np
import pytest

from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.elementwise import silu_mul
from baton.engine.kernels.cuda.linear import MAX_SKINNY, linear
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16

from .host_device import HostDevice, LaunchFailed


def test_a_graph_computes_what_its_arrays_hold_when_it_is_replayed(
    device: Device, rng: np.random.Generator
) -> None:
    gate_up, out = device.zeros((3, 32), np.uint16), device.empty((3, 16), np.uint16)
    graph = device.capture(lambda: silu_mul(device, gate_up, out))
    pinned = device.host_buffer((3, 32), np.uint16)
    for _ in range(3):
        # bfloat16 bits of numbers between 0.5 and 2
        pinned[...] = rng.integers(0x3F00, 0x4000, (3, 32), np.uint16)
        device.write(gate_up, pinned)
        graph.replay()
        expected = device.empty((3, 16), np.uint16)
        silu_mul(device, device.upload(pinned), expected)
        assert device.download(out).tobytes() == device.download(expected).tobytes()


@pytest.mark.parametrize("rows", [MAX_SKINNY, MAX_SKINNY + 8])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_a_graph_holds_products_of_few_rows_and_of_many(
    device: Device, rng: np.random.Generator, rows: int, dtype: type
) -> None:
    depth, width = 64, 48
    weight = to_bf16(rng.standard_normal((width, depth)))
    x, out = device.zeros((rows, depth), np.uint16), device.empty((rows, width), dtype)
    on_device = device.upload(weight)
    graph = device.capture(lambda: linear(device, x, on_device, None, out))
    for _ in range(2):
        values = to_bf16(rng.standard_normal((rows, depth)))
        device.write(x, values)
        graph.replay()
        got = device.download(out)
        got = from_bf16(got) if dtype is np.uint16 else got
        np.testing.assert_allclose(got, from_bf16(values) @ from_bf16(weight).T, 1e-2, 5e-2)


def test_a_write_that_does_not_fit_is_refused(device: Device) -> None:
    array = device.zeros((2, 4), np.int32)
    for values in (np.zeros((2, 3), np.int32), np.zeros((2, 4), np.int64)):
        with pytest.raises(ValueError, match="to int32"):
            device.write(array, values)
    device.write(array, np.arange(8, dtype=np.int32).reshape(2, 4))
    assert device.download(array).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_a_graph_cannot_hold_is_refused_while_it_is_captured(host_device: HostDevice) -> None:
    array = host_device.zeros((4,), np.int32)
    calls = []

    def work(what: str) -> None:
        calls.append(what)
        if len(calls) % 2:  # the first run may do anything
            return
        if what == "download":
            host_device.download(array)
        elif what == "upload":
            host_device.upload(np.zeros(4, np.int32))
        elif what == "empty":
            host_device.empty((4,), np.int32)
        else:
            host_device.write(array, np.zeros(4, np.int32))

    for what in ("download", "upload", "empty", "write"):
        with pytest.raises(LaunchFailed, match="while a graph is captured"):
            host_device.capture(lambda what=what: work(what))  # type: ignore[misc]
    host_device.download(array)
