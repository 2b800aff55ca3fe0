"""Kernels that walk rows: against their NumPy definitions, under shuffled schedules."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.cuda import elementwise, reference
from baton.engine.kernels.cuda.reference import to_bf16


def random_bf16(rng, *shape):
    return to_bf16(rng.standard_normal(shape) * 3)


def steps_apart(bits, expected):
    """Distance in steps of bfloat16, with the two zeros in one place."""
    size = [(v & 0x7FFF).astype(np.int64) * np.where(v & 0x8000, -1, 1) for v in (bits, expected)]
    return np.abs(size[0] - size[1])


def assert_close(bits, expected, share=0.02):
    """Equal but for one step where the exact value lies near the middle of two."""
    apart = steps_apart(bits, expected)
    assert apart.max(initial=0) <= 1
    assert (apart > 0).mean() <= share if apart.size else True


@pytest.mark.sanitized
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1000), (7, 264), (0, 16)])
def test_silu_mul(device, schedules, rng, rows, width):
    gate_up = random_bf16(rng, rows, 2 * width)
    gate_up[:1, :4] = to_bf16([200, -200, np.inf, 0])

    def run():
        out = device.empty((rows, width), np.uint16)
        elementwise.silu_mul(device, device.upload(gate_up), out)
        return [device.download(out)]

    assert_close(schedules(run)[0], reference.silu_mul(gate_up))


@pytest.mark.parametrize(
    ("shape", "out_shape", "dtype", "message"),
    [
        ((3, 24), (3, 12), np.uint16, "multiple of 8"),
        ((3, 32), (3, 8), np.uint16, r"gate_up has shape \(3, 32\), not \(3, 16\)"),
        ((2, 16), (3, 8), np.uint16, "gate_up has shape"),
        ((3, 16), (3, 8), np.float32, "gate_up is float32"),
    ],
)
def test_silu_mul_refuses(device, shape, out_shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        elementwise.silu_mul(device, device.zeros(shape, dtype), device.zeros(out_shape, np.uint16))


def test_a_transposed_view_is_refused(device):
    view = device.zeros((16, 8), np.uint16).T
    with pytest.raises(ValueError, match="not contiguous"):
        elementwise.silu_mul(device, view, device.zeros((8, 8), np.uint16))
