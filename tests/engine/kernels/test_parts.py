"""Long calls of kernels in parts: the same bits, bounded work per part, no part after a stop."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels import parts, reference
from baton.engine.kernels.host_backend import identity_rotation, pack_conv
from baton.engine.kernels.parts import KernelsInParts, in_parts
from baton.engine.kernels.reference import NumpyBackend

# Rows of the largest picture of a model of Flux's widths: 2048 x 2048 pixels and 512 texts.
ROWS, HIDDEN = 16384 + 512, 3072


class Stop(Exception):
    pass


def floats(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def shrink(monkeypatch):
    """Make parts of few rows, so that small arrays have several."""
    monkeypatch.setattr(parts, "PART_PRODUCTS", 3000)
    monkeypatch.setattr(parts, "PART_NUMBERS", 200)
    monkeypatch.setattr(parts, "LEAST_ROWS", 3)
    monkeypatch.setattr(reference, "MOST_SCORES", 100_000)


@pytest.fixture
def small_parts(monkeypatch):
    shrink(monkeypatch)


def linear(kernels, rng):
    out = np.empty((50, 24), np.float32)
    weight = kernels.pack_linear([floats(rng, 24, 40)], floats(rng, 24))
    kernels.linear(floats(rng, 50, 40), weight, out)
    return out


def gated_mlp(kernels, rng):
    out, wide = np.empty((50, 16), np.float32), np.empty((2, 50, 48), np.float32)
    up, down = (
        kernels.pack_linear([floats(rng, 48, 16)]),
        kernels.pack_linear([floats(rng, 16, 24)]),
    )
    active = np.empty((50, 24), np.float32)
    kernels.gated_mlp(floats(rng, 50, 16), up, down, wide[0], active, out)
    return out


def self_attention(kernels, rng):
    """Seven parts of the C kernel."""
    out = np.empty((2000, 16), np.float32)
    bias = floats(rng, 1, 2000, 2000)
    kernels.self_attention(floats(rng, 2000, 48), 2, 0.25, bias, out)
    return out


def joint_attention(kernels, rng):
    """The second head begins within a part."""
    out = np.empty((700, 32), np.float32)
    q, kv = floats(rng, 700, 2, 16), floats(rng, 2, 2, 5000, 16)
    kernels.joint_attention(q, kv, 5000, 0.25, out)
    return out


def rotation(kernels, rng):
    q, kv = np.zeros((53, 2, 16), np.float32), np.zeros((1, 2, 2, 53, 16), np.float32)
    zero, slots = np.zeros(53, np.int32), np.arange(53, dtype=np.int64)[::-1].copy()
    norm, table = floats(rng, 16), identity_rotation(16)
    qkv = floats(rng, 53, 96)
    kernels.qk_norm_rope_append(qkv, zero, slots, table, norm, norm, 1e-6, kv, q)
    return np.concatenate([q.reshape(-1), kv.reshape(-1)])


def modulated_norm(kernels, rng):
    out = np.empty((53, 40), np.float32)
    kernels.modulated_norm(floats(rng, 53, 40), floats(rng, 40), floats(rng, 40), 1e-6, out)
    return out


def activate(kernels, rng):
    x = floats(rng, 53, 40)
    kernels.activate(x, "gelu_tanh", x)
    return x


def add(kernels, rng):
    out = floats(rng, 53, 40)
    kernels.add(floats(rng, 53, 40), out)
    return out


def add_scaled(kernels, rng):
    out = floats(rng, 53, 40)
    kernels.add_scaled(floats(rng, 53, 40), floats(rng, 40), out)
    return out


def put_columns(kernels, rng):
    out = np.zeros((53, 60), np.float32)
    kernels.put_columns(floats(rng, 53, 40), 15, out)
    return out


CALLS = [
    linear, gated_mlp, self_attention, joint_attention, rotation, modulated_norm, activate, add,
    add_scaled, put_columns,
]  # fmt: skip


def group_norm(kernels, rng):
    """An array of more than two parts of the C kernel in each of its passes."""
    x = floats(rng, 600_000, 16)
    kernels.group_norm(x, 4, floats(rng, 16), floats(rng, 16), 1e-6, True, x)
    return x


def conv2d(kernels, rng):
    """Six bands of rows."""
    out = np.empty((96, 128, 8), np.float32)
    weight = pack_conv(kernels, floats(rng, 8, 48, 3, 3), floats(rng, 8))
    kernels.conv2d(floats(rng, 48, 64, 48), weight, 3, out, scale=2)
    return out


@pytest.mark.parametrize("call", [*CALLS, group_norm, conv2d])
def test_parts_write_the_same_bits(compiled, small_parts, call):
    counted = []
    whole = call(compiled, np.random.default_rng(5))
    in_turn = call(in_parts(compiled, lambda: counted.append(1)), np.random.default_rng(5))
    assert in_turn.tobytes() == whole.tobytes()
    assert len(counted) >= 5


@pytest.mark.parametrize("call", [*CALLS, conv2d])
def test_numpy_kernels_agree_in_parts(monkeypatch, call):
    counted = []
    whole = call(NumpyBackend(), np.random.default_rng(5))
    shrink(monkeypatch)
    kernels = in_parts(NumpyBackend(), lambda: counted.append(1))
    # BLAS orders a sum by the shape of the call; the convolution sums 432 products of about 1.
    np.testing.assert_allclose(call(kernels, np.random.default_rng(5)), whole, 1e-5, 1e-4)
    assert counted


@pytest.mark.parametrize("call", [*CALLS, group_norm, conv2d])
def test_nothing_is_called_after_a_stop(compiled, small_parts, call):
    left = 3

    def stop():
        nonlocal left
        left -= 1
        if not left:
            raise Stop

    with pytest.raises(Stop):
        call(in_parts(compiled, stop), np.random.default_rng(5))
    assert left == 0  # a part after the stop would have called again


def test_a_stopped_norm_has_read_one_part_at_most(compiled):
    """The third call comes within the sums of squares or before: nothing is written yet."""
    rows, left = 800_000, 3

    def stop():
        nonlocal left
        left -= 1
        if not left:
            raise Stop

    x, out, ones = np.ones((rows, 16), np.float32), np.zeros((rows, 16), np.float32), np.ones(16)
    weight = ones.astype(np.float32)
    with pytest.raises(Stop):
        in_parts(compiled, stop).group_norm(x, 4, weight, weight, 1e-6, False, out)
    assert not out.any()
    compiled.group_norm(x, 4, weight, weight, 1e-6, False, out)  # the kernel works again
    assert out.any()


class Recorder:
    """Kernels that compute nothing and note the rows of each call."""

    on_host, row_independent = True, True

    def __init__(self):
        self.rows = []

    def __getattr__(self, name):
        def call(first, *rest):
            self.rows.append(len(first))

        return call


class Weight:
    def __init__(self, in_features, out_features):
        self.in_features, self.out_features = in_features, out_features


def zeros(*shape):
    """Return an array that needs no memory."""
    return np.broadcast_to(np.float32(0), shape)


@pytest.mark.parametrize(
    ("call", "each", "most"),
    [
        (
            lambda k: k.linear(zeros(ROWS, 5 * HIDDEN), Weight(5 * HIDDEN, HIDDEN),
                               zeros(ROWS, HIDDEN)),
            5 * HIDDEN * HIDDEN, 10e9,
        ),
        (
            lambda k: k.activate(zeros(ROWS, 4 * HIDDEN), "silu", zeros(ROWS, 4 * HIDDEN)),
            4 * HIDDEN, 5e6,
        ),
        (  # a residual of the VAE's last level
            lambda k: k.add(zeros(2048 * 2048, 256), zeros(2048 * 2048, 256)), 256, 5e6,
        ),
    ],
)  # fmt: skip
def test_no_part_of_the_largest_picture_is_long(call, each, most):
    """The work between two checks is bounded, in products or numbers."""
    kernels, checks = Recorder(), []
    call(KernelsInParts(kernels, lambda: checks.append(1)))
    assert max(kernels.rows) * each <= most
    assert len(checks) == len(kernels.rows) - 1


def test_each_band_of_a_convolution_is_a_part(compiled):
    bands = []
    conv2d(in_parts(compiled, lambda: bands.append(1)), np.random.default_rng(5))
    assert len(bands) == 5


def test_a_device_keeps_its_kernels():
    class Device:
        on_host = False

    device = Device()
    assert in_parts(device, lambda: None) is device
