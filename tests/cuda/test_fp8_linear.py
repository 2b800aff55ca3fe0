"""Products with weights in 8-bit floats: the bits of the bfloat16 weights that they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.benchmarks.checkpoints import write_checkpoint
from baton.engine.kernels.backend import QuantizedWeights
from baton.engine.kernels.cuda import linear as launchers
from baton.engine.kernels.cuda import reference_linear
from baton.engine.kernels.cuda.backend import CudaBackend, CudaFp8Linear, CudaLinear
from baton.engine.kernels.cuda.linear import (
    MAX_FP8,
    MAX_SKINNY,
    Fp8Matrix,
    fp8_linear,
    fp8_linear_silu_mul,
    in_pieces,
)
from baton.engine.kernels.cuda.reference import to_bf16
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.sampling import SamplingParams

from ..engine.fp8_folders import FORMS, Form, write_fp8
from .host_device import HostDevice
from .small_model import SHAPE
from .test_linear import FUSED, assert_sums, run_linear


def drawn(rng, width, depth, group):
    """Every code but NaN, and scales of magnitudes that bf16 rounds; codes, scales, bf16."""
    codes = rng.integers(0, 256, (width, depth)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    scales = rng.uniform(1e-3, 3e-3, (width, -(-depth // group))).astype(np.float32)
    return codes, scales, reference_linear.fp8_weights(codes, scales, group)


def matrix(device, codes, scales, group):
    width = -(-codes.shape[1] // 64) if scales.shape[1] == 1 else group // 64
    return Fp8Matrix(device.upload(in_pieces(codes)), device.upload(scales), codes.shape[1], width)


def run(device, x, weight, bias=None, dtype=np.float32, onto=None, space=None):
    out = device.empty((len(x), weight.shape[0]), dtype) if onto is None else device.upload(onto)
    there = None if bias is None else device.upload(bias)
    room = device.empty((weight.space if space is None else space,), np.uint16)
    fp8_linear(device, device.upload(x), weight, there, out, room, add=onto is not None)
    return device.download(out)


def random_x(rng, rows, depth):
    return to_bf16(rng.standard_normal((rows, depth)))


SHAPES = [
    (1, 16, 64, 64), (1, 5, 8, 8), (3, 33, 200, 128), (7, 100, 1032, 1032), (8, 64, 512, 128),
    (9, 17, 72, 72), (16, 48, 2056, 64), (0, 8, 8, 8),
]  # fmt: skip


@pytest.mark.sanitized
@pytest.mark.parametrize(("rows", "width", "depth", "group"), SHAPES)
def test_the_bits_are_those_of_bfloat16_weights(device, rng, rows, width, depth, group) -> None:
    codes, scales, plain = drawn(rng, width, depth, group)
    weight, x = matrix(device, codes, scales, group), random_x(rng, rows, depth)
    bias = rng.standard_normal(width).astype(np.float32)
    onto = rng.standard_normal((rows, width)).astype(np.float32)
    for more in ({}, {"bias": bias}, {"bias": bias, "onto": onto}, {"dtype": np.uint16}):
        assert run(device, x, weight, **more).tobytes() == (
            run_linear(device, x, plain, **more).tobytes()
        )
    assert_sums(run(device, x, weight), reference_linear.linear(x, plain), x, plain)


@pytest.mark.parametrize("rows", [MAX_SKINNY + 1, 40, MAX_FP8])
def test_rows_beyond_sixteen_have_the_bits_that_they_have_alone(device, rng, rows) -> None:
    codes, scales, _ = drawn(rng, 40, 328, 128)
    weight, x = matrix(device, codes, scales, 128), random_x(rng, rows, 328)
    whole = run(device, x, weight)
    for row in (0, 7, 15, 16, rows - 1):
        assert run(device, x[row : row + 1], weight).tobytes() == whole[row].tobytes()


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_no_schedule_decides_a_bit(device, rng, schedules, rows) -> None:
    codes, scales, _ = drawn(rng, 33, 200, 64)
    weight, x = matrix(device, codes, scales, 64), random_x(rng, rows, 200)
    schedules(lambda: [run(device, x, weight)])


@pytest.mark.parametrize("lines", [40, 7, 1])
def test_many_rows_go_through_bfloat16_some_weights_at_a_time(device, rng, lines) -> None:
    codes, scales, plain = drawn(rng, 40, 136, 64)
    weight, x = matrix(device, codes, scales, 64), random_x(rng, MAX_FP8 + 1, 136)
    bias = rng.standard_normal(40).astype(np.float32)
    onto = rng.standard_normal((len(x), 40)).astype(np.float32)
    for more in ({}, {"bias": bias}, {"onto": onto}):
        got = run(device, x, weight, space=lines * 136, **more)
        exact = reference_linear.linear(x, plain, **more)
        assert_sums(got, exact, x, plain)


@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 24, 64), (6, 16, 136), (8, 56, 520)])
def test_the_gated_product_has_the_bits_of_bfloat16(device, rng, rows, width, depth) -> None:
    device = device.tuned(FUSED)
    codes, scales, plain = drawn(rng, 2 * width, depth, 64)
    x, weight = device.upload(random_x(rng, rows, depth)), matrix(device, codes, scales, 64)
    space = device.empty((rows, 2 * width), np.uint16)
    ours, theirs = (device.empty((rows, width), np.uint16) for _ in range(2))
    assert fp8_linear_silu_mul(device, x, weight, space, ours)
    launchers.linear_silu_mul(device, x, device.upload(plain), space, theirs)
    assert device.download(ours).tobytes() == device.download(theirs).tobytes()


def test_a_planted_scale_of_another_group_is_found(host_device: HostDevice, rng) -> None:
    codes, scales, plain = drawn(rng, 16, 256, 64)
    planted = host_device.with_defines("BATON_PLANT_SCALE_GROUP")
    weight, x = matrix(planted, codes, scales, 64), random_x(rng, 2, 256)
    with pytest.raises(AssertionError):
        assert_sums(run(planted, x, weight), reference_linear.linear(x, plain), x, plain)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 60}, "multiple of 8"),
        ({"depth": 136}, "codes has shape"),
        ({"pieces": 1}, "scales has shape"),
        ({"pieces": 0}, "pieces of a group"),
    ],
)
def test_what_does_not_fit_is_refused(host_device: HostDevice, rng, change, words) -> None:
    codes, scales, _ = drawn(rng, 8, 128, 128)
    whole = matrix(host_device, codes, scales, 128)
    fields = {"codes": whole.codes, "scales": whole.scales, "depth": 128, "pieces": 2, **change}
    x = random_x(rng, 1, fields["depth"])
    with pytest.raises(ValueError, match=words):
        run(host_device, x, Fp8Matrix(**fields))


# ------------------------------------------------------------------------------ packed and served


def test_parts_with_other_scales_become_one_matrix(device, rng) -> None:
    """A scale per row beside scales per group; rows of zeros to a multiple of four."""
    backend = CudaBackend(device)
    one, two = drawn(rng, 5, 128, 64), drawn(rng, 6, 128, 128)
    parts = [QuantizedWeights("F8_E4M3", c, 128, s, g) for (c, s, _), g in ((one, 64), (two, 128))]
    packed = backend.pack_linear(parts)
    assert isinstance(packed, CudaFp8Linear) and packed.out_features == 12
    plain = backend.pack_linear([one[2], two[2]])
    assert isinstance(plain, CudaLinear)
    x = device.upload(random_x(rng, 3, 128))
    found = [backend.empty(3, 12, logits=True) for _ in range(2)]
    backend.linear(x, packed, found[0])
    backend.linear(x, plain, found[1])
    assert device.download(found[0]).tobytes() == device.download(found[1]).tobytes()
    assert packed.nbytes < 0.6 * plain.nbytes


def test_scales_of_narrow_groups_are_applied_at_load(device, rng) -> None:
    codes, scales, plain = drawn(rng, 8, 96, 32)
    packed = CudaBackend(device).pack_linear([QuantizedWeights("F8_E4M3", codes, 96, scales, 32)])
    assert isinstance(packed, CudaLinear)
    assert np.array_equal(device.download(packed.weight), plain)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_model_s_tokens_are_those_of_its_bfloat16_twin(
    tmp_path: Path, device, rng, form: Form
) -> None:
    """Prompts of few rows, of many, and captured steps."""
    folder, twin = write_fp8(write_checkpoint(tmp_path / "a", SHAPE, "BF16"), tmp_path / "b", form)
    prompts = [rng.integers(0, SHAPE.vocab, count).tolist() for count in (5, 11, 90)]
    greedy = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    found, nbytes = [], []
    for place in (folder, twin):
        config = RunnerConfig(model=str(place), backend="numpy", block_size=8, num_blocks=48)
        runner = load_runner(config, backend=CudaBackend(device))
        contexts = LLMEngine(runner).generate(prompts, greedy)
        found.append([context.tokens.generated.tolist() for context in contexts])
        nbytes.append(runner.card.weights_bytes)
    assert found[0] == found[1]
    assert nbytes[0] < 0.75 * nbytes[1]
