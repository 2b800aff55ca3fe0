"""Kernels that walk rows: against their NumPy definitions, under shuffled schedules."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.kernels.backend import ACTIVATIONS
from baton.engine.kernels.cuda import elementwise, reference
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16
from baton.engine.kernels.cuda.tuning import Tuning

EPS = 1e-5


def random_bf16(rng, *shape):
    return to_bf16(rng.standard_normal(shape) * 3)


def steps_apart(bits, expected):
    """Distance in steps of bfloat16, with the two zeros in one place."""
    size = [(v & 0x7FFF).astype(np.int64) * np.where(v & 0x8000, -1, 1) for v in (bits, expected)]
    return np.abs(size[0] - size[1])


def assert_close(bits, expected, share=0.02, sizes=0.0):
    """Equal but for one step where the exact value lies near the middle of two.

    ``sizes`` is the largest of the terms whose difference a value may be: float32 rounds those.
    """
    with np.errstate(invalid="ignore"):  # infinities
        near = np.abs(from_bf16(bits) - from_bf16(expected)) <= 1e-6 * sizes
    apart = np.where(near, 0, steps_apart(bits, expected))
    assert apart.max(initial=0) <= 1
    assert apart.size == 0 or np.count_nonzero(apart) <= 2 + share * apart.size


# ---------------------------------------------------------------- embed


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 264), (3, 4104), (0, 16)])
def test_embed(device, schedules, rng, rows, width):
    table, ids = random_bf16(rng, 37, width), rng.integers(0, 37, rows, np.int32)

    def run():
        out = device.empty((rows, width), np.uint16)
        arrays = (device.upload(ids), device.upload(table))
        elementwise.embed(device, *arrays, out, known_ids=ids)
        return [device.download(out)]

    assert (schedules(run)[0] == table[ids]).all()


@pytest.mark.sanitized
def test_embed_of_ids_outside_the_table(device, rng):
    table, ids = random_bf16(rng, 5, 16), np.array([-1, 4, 5, 2**31 - 1, 0], np.int32)
    out = device.empty((5, 16), np.uint16)
    elementwise.embed(device, device.upload(ids), device.upload(table), out)
    assert (device.download(out) == reference.embed(ids, table)).all()
    with pytest.raises(ValueError, match=r"token ids must be in 0\.\.4, got -1\.\."):
        elementwise.embed(device, device.upload(ids), device.upload(table), out, known_ids=ids)


# ---------------------------------------------------------------- rows put in place


@pytest.mark.sanitized
@pytest.mark.parametrize("add", [False, True], ids=["replaced", "added"])
@pytest.mark.parametrize(("count", "rows", "width"), [(9, 4, 8), (3, 3, 1288), (40, 17, 4616)])
def test_put_rows(device, schedules, rng, count, rows, width, add):
    x, before = random_bf16(rng, rows, width), random_bf16(rng, count, width)
    where = rng.permutation(count)[:rows].astype(np.int32)

    def run(where=where):
        out = device.upload(before)
        arrays = (device.upload(x), device.upload(where), out)
        elementwise.put_rows(device, *arrays, add=add)
        return [device.download(out)]

    expected = before.copy()
    reference.put_rows(x, where, expected, add=add)
    assert (schedules(run)[0] == expected).all()


@pytest.mark.sanitized
@pytest.mark.parametrize("add", [False, True])
def test_rows_outside_are_not_put(device, rng, add):
    x, before = random_bf16(rng, 5, 24), random_bf16(rng, 4, 24)
    where = np.array([-1, 3, 4, 2**31 - 1, 0], np.int32)
    out, expected = device.upload(before), before.copy()
    elementwise.put_rows(device, device.upload(x), device.upload(where), out, add=add)
    reference.put_rows(x, where, expected, add=add)
    assert (device.download(out) == expected).all()


@pytest.mark.parametrize(
    ("x", "rows", "out", "message"),
    [
        ((3, 16), 4, (9, 16), "x has shape"),
        ((4, 8), 4, (9, 16), "x has shape"),
        ((4, 12), 4, (9, 12), "width of out is 12, not a multiple of 8"),
    ],
)
def test_put_rows_refuses(device, x, rows, out, message):
    arrays = device.zeros(x, np.uint16), device.zeros((rows,), np.int32)
    with pytest.raises(ValueError, match=message):
        elementwise.put_rows(device, *arrays, device.zeros(out, np.uint16))


# ---------------------------------------------------------------- norms


@pytest.mark.sanitized
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "f32"])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 1000), (2, 4096), (0, 16)])
def test_rms_norm(device, schedules, rng, rows, width, wide):
    x, weight = random_bf16(rng, rows, width), random_bf16(rng, width)
    x[:1] = to_bf16(rng.standard_normal(width) * 1e-20)  # eps decides
    dtype = np.float32 if wide else np.uint16

    def run():
        out = device.empty((rows, width), dtype)
        elementwise.rms_norm(device, device.upload(x), device.upload(weight), EPS, out)
        return [device.download(out)]

    out, expected = schedules(run)[0], reference.rms_norm(x, weight, EPS)
    if wide:
        np.testing.assert_allclose(out, expected, rtol=2e-6)
    else:
        assert_close(out, to_bf16(expected))


@pytest.mark.parametrize(
    ("rows", "width", "wide"), [(4, 520, False), (1, 16_384, False), (3, 1024, True), (0, 8, True)]
)
def test_add_rms_norm(device, schedules, rng, rows, width, wide):
    x, before = random_bf16(rng, rows, width), random_bf16(rng, rows, width)
    weight = random_bf16(rng, width)

    def run():
        residual = device.upload(before)
        out = device.empty((rows, width), np.float32 if wide else np.uint16)
        elementwise.add_rms_norm(
            device, device.upload(x), residual, device.upload(weight), EPS, out
        )
        return [device.download(residual), device.download(out)]

    residual, out = schedules(run)
    total, expected = reference.add_rms_norm(x, before, weight, EPS)
    assert (residual == total).all()
    if wide:
        np.testing.assert_allclose(out, expected, rtol=2e-6)
    else:
        assert_close(out, to_bf16(expected))


@pytest.mark.parametrize("width", [8, 2048, 2056, 8192])
def test_an_rms_norm_has_the_same_bits_with_one_word_per_thread(device, rng, width):
    shapes = (3, width), (3, width), (width,)
    x, before, weight = (to_bf16(rng.standard_normal(shape)) for shape in shapes)
    found = []
    for rows in (0, 3):
        tuned = device.tuned(Tuning(norm_rows=rows))
        residual, out = device.upload(before), device.zeros(x.shape, np.uint16)
        elementwise.add_rms_norm(tuned, device.upload(x), residual, device.upload(weight), EPS, out)
        again = device.zeros(x.shape, np.uint16)
        elementwise.rms_norm(tuned, residual, device.upload(weight), EPS, again)
        assert (device.download(again) == device.download(out)).all()
        found.append(device.download(out))
    np.testing.assert_array_equal(*found)


def norm_terms(x, weight, bias, eps):
    """The terms of which a layer norm is the sum, by their largest size."""
    scaled = reference.layer_norm(x, weight, np.zeros_like(bias), eps)
    mean = np.abs(from_bf16(x)).max(axis=-1, keepdims=True)
    deviation = from_bf16(x).std(axis=-1, keepdims=True)
    return (
        np.abs(scaled)
        + np.abs(from_bf16(bias))
        + mean / np.sqrt(deviation**2 + eps) * np.abs(from_bf16(weight))
    )


@pytest.mark.sanitized
@pytest.mark.parametrize("add", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 8), (5, 1000), (3, 1152), (2, 4608), (1, 16_384), (0, 16)]
)
def test_layer_norm(device, schedules, rng, rows, width, add):
    """With a mean far above the deviation, as a sum of squares without it would show."""
    x = to_bf16(rng.standard_normal((rows, width)) + 40)
    before = random_bf16(rng, rows, width)
    x[:1] = to_bf16(rng.standard_normal(width) * 1e-20)  # eps decides
    before[:1] = x[:1]
    weight, bias = random_bf16(rng, width), random_bf16(rng, width)

    def run():
        residual, out = device.upload(before), device.empty((rows, width), np.uint16)
        weights = device.upload(weight), device.upload(bias)
        if add:
            elementwise.add_layer_norm(device, device.upload(x), residual, *weights, EPS, out)
        else:
            elementwise.layer_norm(device, device.upload(x), *weights, EPS, out)
        return [device.download(residual), device.download(out)]

    residual, out = schedules(run)
    total = to_bf16(from_bf16(before) + from_bf16(x)) if add else x
    assert (residual == (total if add else before)).all()
    expected = reference.layer_norm(total, weight, bias, EPS)
    assert_close(out, to_bf16(expected), sizes=norm_terms(total, weight, bias, EPS))


def test_a_row_has_the_same_bits_in_any_batch(device, rng):
    x, weight = random_bf16(rng, 6, 1000), device.upload(random_bf16(rng, 1000))
    for norm, weights in (
        (elementwise.rms_norm, (weight,)),
        (elementwise.layer_norm, (weight, device.upload(random_bf16(rng, 1000)))),
    ):
        whole = device.empty(x.shape, np.uint16)
        norm(device, device.upload(x), *weights, EPS, whole)
        for row in (0, 3, 5):
            alone = device.empty((1, 1000), np.uint16)
            norm(device, device.upload(x[row : row + 1]), *weights, EPS, alone)
            assert (device.download(alone)[0] == device.download(whole)[row]).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "eps", "message"),
    [
        ((2, 12), np.uint16, EPS, "width of x is 12, not a multiple of 8"),
        ((2, 16_392), np.uint16, EPS, "more than 16384"),
        ((2, 16), np.float32, EPS, "x is float32, not uint16"),
        ((2, 2, 16), np.uint16, EPS, "x has shape"),
        ((2, 16), np.uint16, 0.0, "eps is 0"),
    ],
)
def test_norms_refuse(device, shape, dtype, eps, message):
    x, out = device.zeros(shape, dtype), device.zeros(shape, np.uint16)
    weight = device.zeros(shape[-1:], np.uint16)
    with pytest.raises(ValueError, match=message):
        elementwise.rms_norm(device, x, weight, eps, out)
    with pytest.raises(ValueError, match=message):
        elementwise.add_rms_norm(device, x, out, weight, eps, out)
    with pytest.raises(ValueError, match=message):
        elementwise.layer_norm(device, x, weight, weight, eps, out)
    with pytest.raises(ValueError, match=message):
        elementwise.add_layer_norm(device, x, out, weight, weight, eps, out)


def test_norms_refuse_other_arrays_that_do_not_fit(device):
    x = device.zeros((3, 16), np.uint16)
    weight, short = device.zeros((16,), np.uint16), device.zeros((8,), np.uint16)
    with pytest.raises(ValueError, match="weight has shape"):
        elementwise.rms_norm(device, x, short, EPS, x)
    with pytest.raises(ValueError, match="out has shape"):
        elementwise.rms_norm(device, x, weight, EPS, device.zeros((2, 16), np.uint16))
    with pytest.raises(ValueError, match="out is int32"):
        elementwise.rms_norm(device, x, weight, EPS, device.zeros((3, 16), np.int32))
    with pytest.raises(ValueError, match="residual has shape"):
        elementwise.add_rms_norm(device, x, device.zeros((3, 8), np.uint16), weight, EPS, x)
    with pytest.raises(ValueError, match="bias has shape"):
        elementwise.layer_norm(device, x, weight, short, EPS, x)
    with pytest.raises(ValueError, match="out is float32"):
        elementwise.layer_norm(device, x, weight, weight, EPS, device.zeros((3, 16), np.float32))
    with pytest.raises(ValueError, match="residual has shape"):
        elementwise.add_layer_norm(device, x, device.zeros((3, 8), np.uint16), weight, weight, 1, x)


# ---------------------------------------------------------------- rotary embedding and append


def rope_case(rng, rows, heads, kv_heads, dim, block_size, blocks, norms=True):
    qkv = random_bf16(rng, rows, (heads + 2 * kv_heads) * dim)
    positions = rng.integers(0, 50, rows, np.int32)
    slots = rng.permutation(blocks * block_size)[:rows].astype(np.int64)
    angle = np.arange(50)[:, None] * 10_000.0 ** (-np.arange(dim // 2) / (dim // 2))
    cos_sin = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    weights = [random_bf16(rng, dim) if norms else None for _ in range(2)]
    pool = random_bf16(rng, blocks, 2, kv_heads, block_size, dim)
    return qkv, positions, slots, cos_sin, *weights, pool


def run_rope(device, case, heads, known=True):
    *arrays, pool = (None if a is None else device.upload(a) for a in case)
    dim = case[-1].shape[-1]
    q_out = device.empty((len(case[0]), heads, dim), np.uint16)
    hints = {"known_positions": case[1], "known_slots": case[2]} if known else {}
    elementwise.qk_norm_rope_append(device, *arrays, EPS, pool, q_out, **hints)
    return [device.download(q_out), device.download(pool)]


def expected_rope(case, heads):
    *arrays, pool = case
    pool = pool.copy()
    return reference.qk_norm_rope_append(*arrays, EPS, pool, heads), pool


@pytest.mark.sanitized
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "block_size", "norms"),
    [
        (5, 8, 2, 128, 16, True),
        (7, 3, 1, 64, 5, False),
        (1, 4, 4, 32, 1, True),
        (9, 2, 1, 16, 8, True),
        (3, 1, 1, 256, 3, False),
        (11, 3, 3, 80, 64, False),
    ],
)
def test_qk_norm_rope_append(device, schedules, rng, rows, heads, kv_heads, dim, block_size, norms):
    case = rope_case(rng, rows, heads, kv_heads, dim, block_size, rows + 2, norms)
    q_out, pool = schedules(lambda: run_rope(device, case, heads))
    q_expected, pool_expected = expected_rope(case, heads)
    assert_close(q_out, q_expected, sizes=50)
    block, offset = np.divmod(case[2], block_size)
    assert (pool[block, 1, :, offset] == pool_expected[block, 1, :, offset]).all()
    assert_close(pool[block, 0, :, offset], pool_expected[block, 0, :, offset], sizes=50)
    untouched = np.ones((len(pool), block_size), bool)
    untouched[block, offset] = False
    moved = pool.swapaxes(1, 3)[np.nonzero(untouched)[0], np.nonzero(untouched)[1]]
    before = case[-1].swapaxes(1, 3)[np.nonzero(untouched)[0], np.nonzero(untouched)[1]]
    assert (moved == before).all()


def test_one_norm_alone(device, rng):
    case = list(rope_case(rng, 4, 2, 1, 64, 4, 4))
    case[4] = None
    q_out, pool = run_rope(device, case, 2)
    q_expected, pool_expected = expected_rope(case, 2)
    assert_close(q_out, q_expected, sizes=50)
    assert_close(pool, pool_expected, sizes=50)


@pytest.mark.sanitized
def test_rows_without_a_slot_append_nothing(device, rng):
    case = rope_case(rng, 6, 2, 1, 64, 4, 6)
    case[2][[1, 3]] = -1
    assert_close(run_rope(device, case, 2)[1], expected_rope(case, 2)[1], sizes=50)
    case[2][4] = 24  # one after the pool
    with pytest.raises(ValueError, match=r"slots must be in 0\.\.23"):
        run_rope(device, case, 2)
    assert_close(run_rope(device, case, 2, known=False)[1], expected_rope(case, 2)[1], sizes=50)
    case[1][0] = 50
    with pytest.raises(ValueError, match=r"positions must be in 0\.\.49"):
        run_rope(device, case, 2)
    run_rope(device, case, 2, known=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: (5, 255)}, "qkv has shape"),
        ({1: (4,)}, "positions has shape"),
        ({2: np.int32}, "slots is int32, not int64"),
        ({3: (50, 32)}, "cos_sin has shape"),
        ({3: np.float64}, "cos_sin is float64"),
        ({4: (32,)}, "q_norm has shape"),
        ({5: np.float32}, "k_norm is float32"),
        ({6: (7, 3, 1, 4, 64)}, "kv_layer has shape"),
        ({6: (7, 2, 1, 4, 48)}, r"head size 48 is not one of \(16, 32, 64, 80, 128, 256\)"),
    ],
)
def test_qk_norm_rope_append_refuses(device, rng, change, message):
    case = list(rope_case(rng, 5, 2, 1, 64, 4, 7))
    for i, new in change.items():
        case[i] = case[i].astype(new) if isinstance(new, type) else np.resize(case[i], new)
    *arrays, pool = (device.upload(a) for a in case)
    q_out = device.empty((5, 2, 64), np.uint16)
    with pytest.raises(ValueError, match=message):
        elementwise.qk_norm_rope_append(device, *arrays, EPS, pool, q_out)


def test_heads_without_a_power_of_two_have_no_norm(device, rng):
    case = rope_case(rng, 4, 2, 1, 80, 4, 4)
    with pytest.raises(ValueError, match="q_norm: heads of 80 have no norm"):
        run_rope(device, case, 2)


# ---------------------------------------------------------------- activations


@pytest.mark.sanitized
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1000), (7, 2056), (0, 16)])
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


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1000), (13, 344), (0, 16)])
def test_activate(device, schedules, rng, rows, width, kind):
    x = random_bf16(rng, rows, width)
    x[:1, :8] = to_bf16([0, 20, -20, 1e30, -1e30, -5, -9, 3e-39])

    def run():
        out, same = device.empty((rows, width), np.uint16), device.upload(x)
        elementwise.activate(device, device.upload(x), kind, out)
        elementwise.activate(device, same, kind, same)
        return [device.download(out), device.download(same)]

    out, same = schedules(run)
    assert (out == same).all()
    assert_close(out, to_bf16(reference.activate(x, kind)), sizes=1e-30)


def test_activate_refuses(device):
    x = device.zeros((3, 16), np.uint16)
    with pytest.raises(ValueError, match="no activation 'relu'"):
        elementwise.activate(device, x, "relu", x)
    with pytest.raises(ValueError, match="x has shape"):
        elementwise.activate(device, x, "gelu", device.zeros((3, 8), np.uint16))
    odd = device.zeros((3, 12), np.uint16)
    with pytest.raises(ValueError, match="multiple of 8"):
        elementwise.activate(device, odd, "gelu", odd)
