"""Picture models on the CUDA kernels: against float64, the CPU's pictures, planted bugs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.kernels.cuda import pictures
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.cuda.pictures import CudaPictures
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16
from baton.engine.kernels.host_backend import PictureBackend, pack_conv
from baton.engine.kernels.load import load_backend
from baton.engine.kernels.reference import NumpyBackend
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pictures.folder import open_folder
from baton.engine.pictures.loading import PictureRunner, load_denoiser, load_encoder
from baton.engine.pictures.pipeline import Denoiser, Drawing, PromptEncoder
from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import ConfigError

from ..engine.kernels.test_host_kernels import convolved
from ..engine.test_pictures import CASES, FOLDER, context_of
from .host_device import HostDevice

F64 = npt.NDArray[np.float64]
DEMO = Path(__file__).parents[2] / "deploy" / "demo_flux"
ORACLE = NumpyBackend(np.float64)
ROUNDING = {"rtol": 2**-8, "atol": 2**-8}
"""Of a bfloat16 result near 1, which the kernels round once."""
CLOSE = 3e-2
"""Relative error of a whole model's results; bfloat16 between all kernels makes 0.5 to 1.7 %."""


@pytest.fixture
def backend(device: Device) -> CudaPictures:
    return CudaPictures(device)


class Data:
    """Random bfloat16 arrays: on the device, and as the float64 that they are."""

    def __init__(self, backend: CudaPictures, rng: np.random.Generator) -> None:
        self.backend, self._rng = backend, rng

    def __call__(self, *shape: int, mean: float = 0.0) -> tuple[npt.NDArray, F64]:
        bits = to_bf16(self._rng.standard_normal(shape) + mean)
        return self.backend.device.upload(bits), from_bf16(bits)

    def empty(self, *shape: int) -> npt.NDArray:
        return self.backend.device.empty(shape, np.uint16)


@pytest.fixture
def data(backend: CudaPictures, rng: np.random.Generator) -> Data:
    return Data(backend, rng)


# ------------------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize(("rows", "heads", "dim", "biases"), [
    (37, 3, 16, 3), (40, 2, 64, 1), (5, 1, 24, 0), (70, 1, 512, 0),
])  # fmt: skip
@pytest.mark.parametrize("limit", [1 << 20, 4 * 40 * 16])
def test_self_attention(data, rng, monkeypatch, rows, heads, dim, biases, limit):
    """The lower limit of scores makes bands of 16 rows, or of fewer."""
    monkeypatch.setattr(pictures, "SCORE_BYTES", limit)
    qkv, exact = data(rows, 3 * heads * dim)
    bias = rng.standard_normal((biases, rows, rows)).astype(np.float32) if biases else None
    if biases == 1:
        bias = np.triu(np.full((1, rows, rows), -np.inf, np.float32), 1)
    out, expected = data.empty(rows, heads * dim), np.empty((rows, heads * dim))
    q, k, v = exact.reshape(rows, 3, heads, dim).transpose(1, 0, 2, 3)
    kv = np.stack([k.transpose(1, 0, 2), v.transpose(1, 0, 2)])
    ORACLE.dense_attention(q.copy(), kv, bias, dim**-0.5, expected)
    uploaded = None if bias is None else data.backend.upload(bias)
    data.backend.self_attention(qkv, heads, dim**-0.5, uploaded, out)
    np.testing.assert_allclose(data.backend.download(out), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(("rows", "keys", "dim"), [(21, 45, 64), (8, 8, 128), (130, 133, 64)])
def test_joint_attention_reads_no_key_after_the_last(data, rows, keys, dim):
    heads, capacity = 2, -(-keys // 8) * 8
    (q, exact_q), out = data(rows, heads, dim), data.empty(rows, heads * dim)
    bits = to_bf16(np.random.default_rng(rows).standard_normal((2, heads, capacity, dim)))
    bits[:, :, keys:] = 0x7FC0  # not a number
    expected = np.empty((rows, heads * dim))
    ORACLE.dense_attention(exact_q, from_bf16(bits)[:, :, :keys], None, dim**-0.5, expected)
    data.backend.joint_attention(q, data.backend.device.upload(bits), keys, dim**-0.5, out)
    np.testing.assert_allclose(data.backend.download(out), expected, rtol=2e-2, atol=1e-2)


def test_rows(data, rng):
    """Additions, products, columns and the modulated norm."""
    backend, rows, width = data.backend, 13, 264
    (x, exact), (scale, exact_scale), (shift, exact_shift) = (
        data(rows, width), data(width), data(width)
    )  # fmt: skip
    for name, work, result in (
        ("add", lambda y: backend.add(x, y), lambda y: y + exact),
        ("scaled", lambda y: backend.add_scaled(x, scale, y), lambda y: y + exact * exact_scale),
        ("product", lambda y: backend.multiply(x, y), lambda y: y * exact),
    ):
        y, before = data(rows, width)
        work(y)
        np.testing.assert_allclose(backend.download(y), result(before), err_msg=name, **ROUNDING)
    wide, before = data(rows, 3 * width)
    backend.put_columns(x, width + 8, wide)
    before[:, width + 8 : 2 * width + 8] = exact
    np.testing.assert_array_equal(backend.download(wide), before)
    out, expected = data.empty(rows, width), np.empty((rows, width))
    backend.modulated_norm(x, shift, scale, 1e-6, out)
    ORACLE.layer_norm(exact, 1 + exact_scale, exact_shift, 1e-6, expected)
    np.testing.assert_allclose(backend.download(out), expected, **ROUNDING)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("rows", "width", "groups", "mean"), [
    (1100, 16, 4, 30.0), (37, 512, 32, 0.0), (512, 40, 5, -3.0), (1, 8, 2, 1.0),
])  # fmt: skip
def test_group_norm(data, rows, width, groups, mean, silu):
    """A mean far from zero would cost the variance its digits if squares were just summed."""
    (x, exact), (weight, exact_weight), (bias, exact_bias) = (
        data(rows, width, mean=mean), data(width), data(width)
    )  # fmt: skip
    out, expected = data.empty(rows, width), np.empty((rows, width))
    args = groups, exact_weight, exact_bias, 1e-6, silu
    ORACLE.group_norm(exact, *args, expected)
    data.backend.group_norm(x, groups, weight, bias, 1e-6, silu, out)
    np.testing.assert_allclose(data.backend.download(out), expected, **ROUNDING)
    data.backend.group_norm(x, groups, weight, bias, 1e-6, silu, x)
    assert data.backend.download(x).tobytes() == data.backend.download(out).tobytes()


@pytest.mark.parametrize("patch_bytes", [1 << 20, 1])
@pytest.mark.parametrize(("kernel", "scale"), [(1, 1), (3, 1), (3, 2), (5, 1)])
def test_conv2d(data, rng, monkeypatch, kernel, scale, patch_bytes):
    """Channels are padded: 6 to 8, and 9 to 16."""
    monkeypatch.setattr(pictures, "PATCH_BYTES", patch_bytes)
    backend, bias = data.backend, rng.standard_normal(9).astype(np.float32)
    weight = from_bf16(to_bf16(rng.standard_normal((9, 6, kernel, kernel)) / kernel))
    bits = to_bf16(rng.standard_normal((5, 7, 8)))
    packed = pack_conv(backend, weight.astype(np.float32), bias)
    out = backend.empty(35 * scale**2, 16, logits=True).reshape(5 * scale, 7 * scale, 16)
    backend.conv2d(backend.device.upload(bits), packed, kernel, out, scale=scale)
    expected = convolved(from_bf16(bits)[:, :, :6], weight, bias, scale)
    found = backend.download(out)
    np.testing.assert_allclose(found[..., :9], expected, rtol=1e-4, atol=1e-4)
    assert not found[..., 9:].any()


def test_latents_and_pixels(backend, rng):
    x, base, y = rng.standard_normal((3, 6, 24)).astype(np.float32)
    for given in (None, base):
        sent = [None if a is None else backend.upload(a) for a in (x, given, y)]
        expected = y + 0.3 * (x.astype(float) - (0 if given is None else given))
        found = backend.download(backend.mix(*sent, 0.3))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(
        backend.download(backend.activations(backend.upload(x))), from_bf16(to_bf16(x))
    )
    for bad in (np.nan, np.inf, -np.inf):
        assert backend.all_finite(backend.upload(x))
        x[5, 23] = bad
        assert not backend.all_finite(backend.upload(x))
        x[5, 23] = 3e38
    image = rng.uniform(-1.3, 1.3, (7, 9, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        backend.to_pixels(backend.upload(image)), load_backend("numpy").to_pixels(image)
    )


def test_arguments_that_do_not_fit_are_refused(data):
    backend = data.backend
    (x, _), (wide, _), (narrow, _) = data(4, 48), data(4, 96), data(16)
    image, packed = x.reshape(2, 2, 48), pack_conv(backend, np.ones((8, 16, 3, 3)), np.ones(8))
    refused: list[Callable[[], object]] = [
        lambda: backend.add(x, wide),
        lambda: backend.add_scaled(x, narrow, x),
        lambda: backend.put_columns(x, 50, wide),
        lambda: backend.put_columns(x, 56, wide),
        lambda: backend.group_norm(x, 5, x[0], x[0], 1e-6, False, x),
        lambda: backend.self_attention(x, 1, 1.0, backend.upload(np.ones((1, 3, 3), "f4")), x),
        lambda: backend.joint_attention(x.reshape(4, 1, 48), x, 4, 1.0, x),
        lambda: backend.conv2d(image, packed, 3, image),
        lambda: backend.to_pixels(image),
        lambda: backend.activations(x),
    ]
    for i, work in enumerate(refused):
        with pytest.raises(ValueError, match=r"."):
            work()
            pytest.fail(f"call {i} was not refused")


def test_no_order_of_threads_changes_a_bit(data, backend, schedules):
    x, qkv = data(600, 32)[0], data(21, 48)[0]
    weight, bias = data(32)[0], data(32)[0]

    def run() -> list[npt.NDArray[np.generic]]:
        normed, mixed = data.empty(600, 32), data.empty(21, 16)
        backend.group_norm(x, 4, weight, bias, 1e-6, True, normed)
        backend.self_attention(qkv, 2, 0.3, None, mixed)
        return [backend.device.download(normed), backend.device.download(mixed)]

    schedules(run)


@pytest.mark.parametrize("bug", ["SOFTMAX_BARRIER", "GATE", "GROUP_BARRIER", "EDGE"])
def test_planted_bugs_are_noticed(host_device: HostDevice, rng, bug):
    """Each changes the result of one of the checks above."""
    results = []
    qkv, x = to_bf16(rng.standard_normal((300, 48))), to_bf16(rng.standard_normal((600, 32)))
    weight = rng.standard_normal((8, 32, 3, 3)).astype(np.float32)
    for device in (host_device, host_device.with_defines(f"BATON_PLANT_{bug}")):
        backend = CudaPictures(device)
        for seed in range(4):
            with device.order(seed):
                mixed, normed = backend.empty(300, 16), backend.empty(600, 32)
                backend.self_attention(device.upload(qkv), 1, 1.0, None, mixed)
                given = device.upload(x)
                backend.group_norm(given, 4, given[0], given[1], 1e-6, False, normed)
                gated = device.upload(x)
                backend.add_scaled(given, given[2], gated)
                image = backend.empty(600, 8).reshape(20, 30, 8)
                packed = pack_conv(backend, weight, np.ones(8, np.float32))
                backend.conv2d(given.reshape(20, 30, 32), packed, 3, image)
                results.append(
                    [backend.download(a).tobytes() for a in (mixed, normed, gated, image)]
                )
    assert all(result == results[0] for result in results[:4])
    assert any(result != results[0] for result in results[4:])


# ------------------------------------------------------------------------------------------- models


class Halves:
    """Encoders and denoiser of a folder."""

    def __init__(self, folder: Path, kernels: PictureBackend) -> None:
        opened = open_folder(folder)
        self.encoder = PromptEncoder(opened, kernels)
        self.denoiser = Denoiser(opened, kernels)

    def draw(self, context) -> Drawing:
        drawing = self.denoiser.start(context, self.encoder.encode(context))
        while not drawing.is_done:
            self.denoiser.step([drawing])
        return drawing


def distance(got: npt.NDArray, exact: npt.NDArray) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


@pytest.fixture(scope="module")
def exact() -> Halves:
    return Halves(FOLDER, load_backend("numpy"))


@pytest.fixture(scope="module")
def halves(device: Device) -> Halves:
    return Halves(FOLDER, CudaPictures(device))


def errors_of(halves: Halves, exact: Halves, case: str) -> dict[str, float]:
    """Relative errors of the state, the latents after the last step, and the pixels."""
    context = context_of(case)
    expected, state = exact.encoder.encode(context), halves.encoder.encode(context)
    errors = {name: distance(state[name], expected[name]) for name in expected}
    drawing, right = halves.draw(context), exact.draw(context)
    latents = halves.denoiser._backend.download(drawing.latents)
    errors["latents"] = distance(latents, right.latents)
    pixels, wanted = halves.denoiser.finish(drawing), exact.denoiser.finish(right)
    assert pixels.dtype == np.uint8
    assert wanted.std() > 20
    return errors | {"pixels": distance(pixels.astype(float), wanted.astype(float))}


@pytest.mark.parametrize("case", CASES)
def test_a_picture_is_the_cpu_s_but_for_bfloat16(halves, exact, case):
    errors = errors_of(halves, exact, case)
    assert max(errors.values()) < CLOSE, errors


def test_the_demo_s_heads_of_24_channels_are_padded(device):
    request = PixelContext(
        tokens=TokenBuffer(np.array([130, 7, 99, 12, 131])),
        tokens_2=TokenBuffer(np.arange(3, 18)),
        height=32,
        width=16,
        num_inference_steps=2,
    )
    exact, halves = Halves(DEMO, load_backend("numpy")), Halves(DEMO, CudaPictures(device))
    assert halves.denoiser.transformer._heads.wide == 64
    right, drawing = exact.draw(request), halves.draw(request)
    latents = halves.denoiser._backend.download(drawing.latents)
    # Noise of any seed: 0.009 to 0.032 in 7 runs.
    assert distance(latents, right.latents) < 2 * CLOSE


def unscaled(heads: int, dim: int, to: int) -> npt.NDArray[np.intp]:
    """Heads that are padded after both halves."""
    order = np.full((heads, to), -1, np.intp)
    order[:, :dim] = np.arange(heads * dim).reshape(heads, dim)
    return order.reshape(-1)


@pytest.mark.parametrize(("bug", "seen"), [
    ("GATE", "latents"), ("EDGE", "pixels"), ("halves", "latents"), ("negative", "latents"),
])  # fmt: skip
def test_a_bug_makes_another_picture(host_device, exact, monkeypatch, bug, seen):
    device = host_device.with_defines(f"BATON_PLANT_{bug}") if bug.isupper() else host_device
    kernels = CudaPictures(device)
    if bug == "halves":
        monkeypatch.setattr("baton.engine.pictures.joint.padded_heads", unscaled)
    if bug == "negative":
        mix = kernels.mix
        monkeypatch.setattr(
            kernels, "mix", lambda x, base, y, s: mix(x, None if base is None else y, y, s / 2)
        )
    errors = errors_of(Halves(FOLDER, kernels), exact, "guided")
    assert errors[seen] > 2 * CLOSE, errors


def test_state_is_uploaded_once_and_latents_stay_on_the_device(device, monkeypatch):
    """Per step the host sends a sinusoid of the time, and of the guidance."""
    halves = Halves(FOLDER, CudaPictures(device))
    context = context_of("guided")
    drawing = halves.denoiser.start(context, halves.encoder.encode(context))
    halves.denoiser.step([drawing])
    sent: list[tuple[int, ...]] = []
    upload = device.upload
    monkeypatch.setattr(device, "upload", lambda a: sent.append(a.shape) or upload(a))
    monkeypatch.setattr(device, "download", lambda a: pytest.fail("a download in a step"))
    halves.denoiser.step([drawing])
    assert sent == [(2, 256), (2, 256)]


# ------------------------------------------------------------------------------------------ workers


def settings(**fields) -> RunnerConfig:
    return RunnerConfig(model=str(FOLDER), num_blocks=64, block_size=16, **fields)


def runners(device: Device) -> tuple[PictureRunner, PictureRunner]:
    kernels = CudaPictures(device)
    return load_encoder(settings(), backend=kernels), load_denoiser(settings(), backend=kernels)


def test_workers_keep_the_state_in_host_memory(device):
    for runner in runners(device):
        assert runner.card.numerics.startswith(f"{device.name}-")
        assert runner.card.numerics.endswith("-bf16/F32")
        assert runner.backend.on_host
        assert isinstance(runner.pool, np.ndarray)
        assert runner.pool.dtype == np.float32
        assert runner.backend.lost == device.lost == ""
        assert runner.backend.gpu == device.gpu
    with pytest.raises(ConfigError, match="too small"):
        load_denoiser(settings(gpu_memory_utilization=1e-9), backend=CudaPictures(device))


def test_a_lost_device_ends_the_worker(device, monkeypatch):
    runner = runners(device)[0]
    monkeypatch.setattr(type(device), "lost", "unplugged")
    assert runner.backend.lost == "unplugged"


@pytest.mark.parametrize(("part", "change", "message"), [
    ("transformer", {"attention_head_dim": 132, "axes_dims_rope": [44, 44, 44]}, "up to 128"),
    ("text_encoder", {"intermediate_size": 42}, "intermediate_size of text_encoder must be"),
    ("vae", {"block_out_channels": [8, 8, 4096]}, "group norms of up to 2048 channels, not 4096"),
])  # fmt: skip
def test_models_that_the_kernels_do_not_support_are_refused(
    device, tmp_path, part, change, message
):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    config = folder / part / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_denoiser(RunnerConfig(model=str(folder), num_blocks=64), backend=CudaPictures(device))
