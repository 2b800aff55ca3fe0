"""Audio decoders on the CUDA kernels: against float64, the CPU's samples, planted bugs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from baton.engine.audio.chunks import LONGEST_CHUNK, AudioDecoder, chunk_end, load_audio
from baton.engine.audio.codec_kernels import codec_kernels
from baton.engine.audio.pcm import pcm16
from baton.engine.audio.snac import Rows, SnacDecoder
from baton.engine.kernels.cuda.audio import CudaAudio
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device
from baton.engine.kernels.load import load_backend
from baton.engine.kernels.reference import NumpyBackend
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.errors import ConfigError

from ..gpu.speaker import make_speaker
from .host_device import HostDevice

F32 = npt.NDArray[np.float32]
FOLDER = Path(__file__).parents[1] / "data" / "codecs" / "snac"
REFERENCE = np.load(FOLDER / "reference.npz")
ORACLE = NumpyBackend(np.float64)
FRAMES, SAMPLES = 30, 96
"""Frames of the reference, and samples of a frame."""
EXACT = {"rtol": 1e-5, "atol": 2e-5}
"""Of sums of up to 500 products of values near 1."""
CLOSE = 2e-6
"""Error of a sample; the CPU's kernels are held to the same."""


@pytest.fixture
def backend(device: Device) -> CudaAudio:
    return CudaAudio(device)


def floats(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, np.float32)


def scales_of(rng: np.random.Generator, width: int) -> F32:
    alpha = rng.uniform(0.2, 4, width).astype(np.float32)
    return np.stack([alpha, 1 / (alpha + np.float32(1e-9))])


def exact(name: str, shape: tuple[int, ...], *arguments: object, **options: object) -> npt.NDArray:
    """Return what the definition writes into its last array, in float64."""
    wide = [a.astype(float) if isinstance(a, np.ndarray) else a for a in arguments]
    out = np.zeros(shape)
    getattr(ORACLE, name)(*wide, out, **options)
    return out


# ------------------------------------------------------------------------------------------ kernels


@pytest.mark.sanitized
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize(("count", "dim", "width"), [(1, 8, 768), (90, 4, 32)])
def test_look_up(backend, rng, count, dim, width, stride):
    """The second call adds to the first."""
    table, weight, bias = floats(rng, 50, dim), floats(rng, width, dim), floats(rng, width)
    out, expected = backend.empty(count * stride, width), np.zeros((count * stride, width))
    for add in (False, True):
        ids = rng.integers(0, 50, count, np.int32)
        packed = backend.pack_linear([weight], bias)
        backend.look_up(ids, backend.upload(table), packed, stride, out, add=add)
        vectors = table[ids].astype(float) @ weight.T.astype(float) + bias
        expected += np.repeat(vectors, stride, axis=0)
        np.testing.assert_allclose(backend.download(out), expected, **EXACT)


@pytest.mark.sanitized
@pytest.mark.parametrize(("rows", "columns", "taps", "out"), [
    (1, 4, 1, 4), (64, 16, 1, 64), (65, 20, 1, 68), (3, 132, 2, 132), (130, 64, 2, 40),
    (300, 64, 7, 1), (1, 4, 7, 1), (70, 12, 7, 4),
])  # fmt: skip
def test_convolve(backend, rng, rows, columns, taps, out):
    x, weight, bias = (
        floats(rng, rows + taps - 1, columns), floats(rng, out, taps * columns), floats(rng, out)
    )  # fmt: skip
    windows = np.stack([x[t : t + taps].ravel() for t in range(rows)]).astype(float)
    sizes = np.abs(windows) @ np.abs(weight.T) + np.abs(bias)  # a rounding's error grows with them
    for shift in (bias, None):
        expected = windows @ weight.T.astype(float)
        result = backend.empty(rows, out)
        work = backend.linear if taps == 1 else backend.convolve
        work(backend.upload(x), backend.pack_linear([weight], shift), result)
        expected = expected if shift is None else expected + shift
        assert (np.abs(backend.download(result) - expected) <= 3e-7 * sizes).all()


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "width", "first", "after"), [
    (6, 4, 0, 0), (90, 64, 1, 1), (7, 512, 3, 0), (1, 16, 0, 3), (0, 8, 2, 1),
])  # fmt: skip
def test_snake(backend, rng, rows, width, first, after, added):
    x, residual, scales = (
        floats(rng, rows, width) * 5,
        floats(rng, rows, width),
        scales_of(rng, width),
    )
    out = backend.empty(first + rows + after, width)
    given, kept = backend.upload(x), backend.upload(residual)
    if added:
        backend.add_snake(given, kept, backend.upload(scales), out, first)
        x = x + residual
        assert np.array_equal(backend.download(kept), x)
    else:
        backend.snake(given, backend.upload(scales), out, first)
    expected = exact("snake", (rows, width), x, scales)
    expected = np.pad(expected, ((first, after), (0, 0)))
    np.testing.assert_allclose(backend.download(out), expected, rtol=1e-6, atol=3e-6)


def test_snake_is_accurate_over_many_periods_and_in_place(backend):
    x = np.linspace(-3000, 3000, 60_000, dtype=np.float32)[None]
    scales = np.ones((2, x.shape[1]), np.float32)
    both = backend.upload(x)
    backend.snake(both, backend.upload(scales), both)
    expected = exact("snake", x.shape, x, scales)
    np.testing.assert_allclose(backend.download(both), expected, rtol=2e-7, atol=3e-7)


@pytest.mark.sanitized
@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize(("rows", "width"), [(1, 4), (20, 68), (70, 16)])
def test_depthwise(backend, rng, rows, width, dilation, active):
    x, weight, bias = floats(rng, rows, width), floats(rng, 7, width), floats(rng, width)
    scales = scales_of(rng, width) if active else None
    out = backend.empty(rows, width)
    uploaded = [backend.upload(a) for a in (x, weight, bias)]
    backend.depthwise(*uploaded, dilation, None if scales is None else backend.upload(scales), out)
    expected = exact("depthwise", (rows, width), x, weight, bias, dilation, scales)
    np.testing.assert_allclose(backend.download(out), expected, **EXACT)


def test_soft_clip(backend):
    x = np.concatenate([np.linspace(-12, 12, 5001), [0, -0.0, 1e30, -1e30]]).astype(np.float32)
    out = backend.empty(1, len(x)).reshape(-1)
    backend.soft_clip(backend.upload(x), out)
    # A step of a 16-bit sample is 3e-5; a GPU's fast division may be off by two bits.
    np.testing.assert_allclose(backend.download(out), np.tanh(x.astype(float)), atol=5e-7)


def test_rows_have_the_same_bits_in_any_window(backend, rng):
    """Also if the rows of a window are in other tiles, or in fewer of them."""
    x = floats(rng, 200, 36)
    for taps, width in ((1, 68), (2, 68), (7, 1)):
        packed = backend.pack_linear([floats(rng, width, taps * 36)], floats(rng, width))
        whole, part = backend.empty(201 - taps, width), backend.empty(20, width)
        work = backend.linear if taps == 1 else backend.convolve
        work(backend.upload(x), packed, whole)
        work(backend.upload(x[57 : 76 + taps]), packed, part)
        assert backend.download(whole)[57:77].tobytes() == backend.download(part).tobytes()


def test_no_order_of_threads_changes_a_bit(backend, rng, schedules):
    x, ids = backend.upload(floats(rng, 70, 20)), rng.integers(0, 9, 35, np.int32)
    dense = backend.pack_linear([floats(rng, 68, 40)], floats(rng, 68))
    narrow = backend.pack_linear([floats(rng, 1, 140)], floats(rng, 1))
    table, entry = backend.upload(floats(rng, 9, 8)), backend.pack_linear([floats(rng, 20, 8)])
    scales, weight = backend.upload(scales_of(rng, 20)), backend.upload(floats(rng, 7, 20))

    def run() -> list[npt.NDArray]:
        looked, mixed = backend.empty(70, 20), backend.empty(70, 20)
        active, wide, one = backend.empty(73, 20), backend.empty(69, 68), backend.empty(64, 1)
        backend.look_up(ids, table, entry, 2, looked, add=False)
        backend.snake(x, scales, active, 2)
        backend.depthwise(x, weight, weight[0], 3, scales, mixed)
        backend.convolve(x, dense, wide)
        backend.convolve(x, narrow, one)
        return [backend.download(array) for array in (looked, mixed, active, wide, one)]

    schedules(run)


def test_arguments_that_do_not_fit_are_refused(backend, rng):
    x, y = backend.upload(floats(rng, 8, 4)), backend.empty(8, 4)
    weight, bias, scales = (backend.upload(floats(rng, *s)) for s in ((7, 4), (4,), (2, 4)))
    five, odd = backend.upload(scales_of(rng, 5)), backend.empty(8, 6)
    packed, table = backend.pack_linear([floats(rng, 4, 8)]), backend.upload(floats(rng, 9, 8))
    ids = np.arange(8, dtype=np.int32)
    refused: list[Callable[[], object]] = [
        lambda: backend.snake(x, scales[:1], y),
        lambda: backend.snake(x, five, y),
        lambda: backend.snake(x, scales, y, 1),
        lambda: backend.snake(x, scales, y[:7]),
        lambda: backend.snake(odd, backend.empty(2, 6), odd),
        lambda: backend.add_snake(x, x[:3], scales, y),
        lambda: backend.depthwise(x, weight[:6], bias, 1, None, y),
        lambda: backend.depthwise(x, weight, bias[:3], 1, None, y),
        lambda: backend.depthwise(x, weight, bias, 0, None, y),
        lambda: backend.depthwise(x, weight, bias, 1 << 30, None, y),
        lambda: backend.depthwise(x, weight, bias, 1, five, y),
        lambda: backend.depthwise(x[:5], weight, bias, 1, None, y),
        lambda: backend.convolve(x, packed, y),
        lambda: backend.convolve(x[:4], backend.pack_linear([floats(rng, 4, 4)]), y),
        lambda: backend.linear(x, packed, y),
        lambda: backend.pack_linear([floats(rng, 4, 6)]),
        lambda: backend.pack_linear([floats(rng, 3, 8)]),
        lambda: backend.pack_linear([floats(rng, 4, 8)], floats(rng, 5)),
        lambda: backend.look_up(ids + 2, table, packed, 1, y, add=False),
        lambda: backend.look_up(ids - 1, table, packed, 1, y, add=False),
        lambda: backend.look_up(ids, table, packed, 2, y, add=False),
        lambda: backend.soft_clip(x[0], y[0, :3]),
    ]  # fmt: skip
    for i, work in enumerate(refused):
        with pytest.raises(ValueError, match=r"."):
            work()
            pytest.fail(f"call {i} was not refused")
    with pytest.raises(TypeError, match="another backend: NumpyLinear"):
        backend.linear(x, load_backend("numpy").pack_linear([floats(rng, 4, 4)]), y)


# ------------------------------------------------------------------------------------------ decoder


def entries_of(first: int = 0, end: int = FRAMES) -> list[npt.NDArray[np.int32]]:
    entries = [REFERENCE[f"entries_{i}"] for i in range(3)]
    return [e[first * len(e) // FRAMES : end * len(e) // FRAMES] for e in entries]


def windows_of(decoder: SnacDecoder, reach: int) -> list[F32]:
    """The samples of chunks, each from its frames and ``reach`` frames on both sides."""
    parts, first = [], 0
    while first < FRAMES:
        end = min(chunk_end(first), FRAMES)
        start, stop = max(0, first - reach), min(FRAMES, end + reach)
        wanted = Rows((first - start) * SAMPLES, (end - start) * SAMPLES)
        parts.append(decoder.decode(entries_of(start, stop), wanted))
        first = end
    return parts


@pytest.fixture(scope="module")
def decoder(device: Device) -> SnacDecoder:
    return SnacDecoder(FOLDER, CudaAudio(device))


@pytest.fixture(scope="module")
def whole(decoder: SnacDecoder) -> F32:
    return decoder.decode(entries_of())


def test_the_audio_is_the_package_s_and_the_cpu_s_but_for_the_last_bit(whole):
    assert whole.dtype == np.float32
    np.testing.assert_allclose(whole, REFERENCE["audio"], atol=CLOSE)
    theirs = SnacDecoder(FOLDER, load_backend()).decode(entries_of())
    np.testing.assert_allclose(whole, theirs, atol=CLOSE)
    ours, theirs = (np.frombuffer(pcm16(a), np.int16).astype(int) for a in (whole, theirs))
    assert np.abs(ours - theirs).max() <= 1
    assert np.mean(ours != theirs) < 0.05


def test_a_window_with_its_context_has_the_bits_of_the_whole(decoder, whole):
    assert np.concatenate(windows_of(decoder, decoder.context_frames)).tobytes() == whole.tobytes()


def test_any_range_of_samples_has_the_bits_of_the_whole(decoder, whole):
    draws = np.random.default_rng(3)
    for _ in range(8):
        first, end = sorted(draws.integers(0, FRAMES * SAMPLES + 1, 2).tolist())
        assert (
            decoder.decode(entries_of(), Rows(first, end)).tobytes() == whole[first:end].tobytes()
        )


def test_no_order_of_threads_changes_a_sample(decoder, whole, schedules):
    (samples,) = schedules(lambda: [decoder.decode(entries_of(4, 17))])
    reach = decoder.context_frames
    inner = slice(reach * SAMPLES, (13 - reach) * SAMPLES)
    assert samples[inner].tobytes() == whole[4 * SAMPLES : 17 * SAMPLES][inner].tobytes()


def test_chunks_after_the_first_allocate_nothing(device, monkeypatch):
    kernels = CudaAudio(device)
    audio = AudioDecoder(SnacDecoder(FOLDER, kernels), 16)
    audio.reserve()
    for name in ("empty", "zeros", "upload", "host_buffer"):
        monkeypatch.setattr(kernels.device, name, lambda *_: pytest.fail("an allocation"))
    rng, stream = np.random.default_rng(1), audio.stream()
    sizes = [len(chunk) for chunk in stream.feed((16 + rng.integers(0, 224, 7 * 60)).tolist())]
    sizes += [len(chunk) for chunk in stream.finish()]
    assert max(sizes) == LONGEST_CHUNK * SAMPLES
    assert sum(sizes) == 60 * SAMPLES


@pytest.fixture(scope="module")
def whole_on_host(host_device: HostDevice) -> F32:
    return SnacDecoder(FOLDER, CudaAudio(host_device)).decode(entries_of())


def test_steps_and_codec_have_streams_of_their_own(host_device, whole_on_host):
    """A decoding while a step is captured becomes no part of the graph."""
    decoder, found = SnacDecoder(FOLDER, CudaAudio(host_device)), []
    graph = host_device.capture(lambda: found.append(decoder.decode(entries_of())))
    assert graph.launches == []
    assert all(samples.tobytes() == whole_on_host.tobytes() for samples in found)


@pytest.mark.parametrize("seed", range(1, 5))
def test_streams_that_run_late_change_no_sample(host_device, whole_on_host, seed):
    decoder = SnacDecoder(FOLDER, CudaAudio(host_device.late(seed)))
    assert decoder.decode(entries_of()).tobytes() == whole_on_host.tobytes()


def test_channels_that_the_kernels_do_not_support_are_refused(device, tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "snac")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"codebook_dim": 6}))
    with pytest.raises(ConfigError, match="on cuda the codec's channels must be multiples of 4"):
        SnacDecoder(folder, CudaAudio(device))


def test_the_numerics_of_a_speech_model_name_the_codec_s(device, tmp_path):
    """Otherwise workers whose codecs make other samples would take each other's requests."""
    folder = make_speaker(tmp_path / "speaker")
    config = RunnerConfig(model=str(folder), block_size=8, num_blocks=32)
    runner = load_runner(config, backend=CudaBackend(device))
    assert runner.card.numerics.endswith("-bf16/BF16/audio1-f32")
    kernels = codec_kernels(runner.backend)
    assert isinstance(kernels, CudaAudio)
    assert kernels.device is not device
    assert load_audio(folder, kernels)[1].codec.backend is kernels
    on_cpu = load_runner(config)
    assert on_cpu.card.numerics == f"{on_cpu.backend.numerics}/BF16/kv-bfloat16"
    assert codec_kernels(on_cpu.backend).numerics == on_cpu.backend.numerics
    (folder / "speech.json").unlink()
    silent = load_runner(config, backend=CudaBackend(device))
    assert silent.card.numerics.endswith("-bf16/BF16")


# --------------------------------------------------------------------------------------------- bugs


@pytest.mark.parametrize("bug", ["DILATION", "TAP", "MARGIN", "PRODUCT_BARRIER"])
def test_planted_bugs_change_the_samples(host_device: HostDevice, bug: str) -> None:
    """A dilation ignored, a tap of a convolution one row off, no zeros around rows, a race."""
    device = host_device.with_defines(f"BATON_PLANT_{bug}")
    decoder, right = SnacDecoder(FOLDER, CudaAudio(device)), REFERENCE["audio"]
    found = []
    for seed in range(2):
        with device.order(seed):
            found.append(decoder.decode(entries_of()))
    assert max(np.abs(np.nan_to_num(each, nan=9.0) - right).max() for each in found) > 100 * CLOSE


def test_planted_context_of_a_frame_less_changes_the_samples(decoder, whole):
    found = np.concatenate(windows_of(decoder, decoder.context_frames - 1))
    assert found.tobytes() != whole.tobytes()


def test_planted_window_off_by_a_frame_changes_the_samples(decoder, whole, monkeypatch):
    latents = decoder._latents
    monkeypatch.setattr(
        decoder, "_latents", lambda entries: latents([np.roll(e, len(e) // 12) for e in entries])
    )
    found = decoder.decode(entries_of(4, 16), Rows(6 * SAMPLES, 7 * SAMPLES))
    assert np.abs(found - whole[10 * SAMPLES : 11 * SAMPLES]).max() > 100 * CLOSE


def test_planted_download_without_a_wait_is_noticed(host_device, whole_on_host, monkeypatch):
    results = []
    for seed in range(1, 5):
        kernels = CudaAudio(host_device.late(seed))
        decoder = SnacDecoder(FOLDER, kernels)
        event = type(kernels.device.record())
        monkeypatch.setattr(event, "wait", lambda self: None)
        results.append(decoder.decode(entries_of()).tobytes())
    assert any(result != whole_on_host.tobytes() for result in results)
