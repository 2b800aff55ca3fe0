"""The SNAC decoder beside the snac package's results (tests/oracle/make_codecs.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from baton.engine.audio.snac import Rows, SnacDecoder, SnacEncoder
from baton.engine.kernels.load import load_backend
from baton.engine.loading.safetensors import TensorStore
from baton.proto.errors import CheckpointError, InputError

FOLDER = Path(__file__).resolve().parents[2] / "data" / "codecs" / "snac"
FRAMES = 30
SAMPLES = 96  # of a frame


@pytest.fixture(scope="module")
def reference():
    return np.load(FOLDER / "reference.npz")


@pytest.fixture(params=["numpy", "amx", "avx512bf16", "avx512", "avx2", "plain"])
def decoder(request):
    if request.param == "numpy":
        return SnacDecoder(FOLDER, load_backend("numpy"))
    try:
        return SnacDecoder(FOLDER, load_backend("cpu", isa=request.param))
    except (ImportError, ValueError):
        pytest.skip(f"no {request.param} kernels here")


def entries_of(reference, first=0, end=FRAMES):
    entries = [reference[f"entries_{i}"] for i in range(3)]
    return [e[first * len(e) // FRAMES : end * len(e) // FRAMES] for e in entries]


def test_the_audio_is_the_packages(decoder, reference):
    audio = decoder.decode(entries_of(reference))
    assert audio.dtype == np.float32
    np.testing.assert_allclose(audio, reference["audio"], atol=2e-6)


def test_the_entries_are_the_packages(reference):
    """The samples end within a frame."""
    samples = reference["samples"].astype(np.float32) / 32768
    for index, entries in enumerate(SnacEncoder(FOLDER).encode(samples)):
        assert entries.dtype == np.int32
        assert np.array_equal(entries, reference[f"encoded_{index}"])
    with pytest.raises(InputError, match=r"20\.1 s, limit 20 s"):
        SnacEncoder(FOLDER).encode(np.broadcast_to(np.float32(0), int(20.1 * 8000)))


def test_windows_are_the_packages_windows(decoder, reference):
    for i, (first, end) in enumerate(reference["windows"].tolist()):
        audio = decoder.decode(entries_of(reference, first, end))
        np.testing.assert_allclose(audio, reference[f"window_{i}"], atol=2e-6)


def test_a_window_with_its_context_is_part_of_the_whole(decoder, reference):
    """Also the bits are equal if a row's bits do not depend on other rows."""
    whole = decoder.decode(entries_of(reference))
    reach = decoder.context_frames
    for first, count in [(0, 1), (1, 2), (reach, 1), (12, 4), (FRAMES - 1, 1), (0, FRAMES)]:
        start, end = max(0, first - reach), min(FRAMES, first + count + reach)
        wanted = Rows((first - start) * SAMPLES, (first - start + count) * SAMPLES)
        part = decoder.decode(entries_of(reference, start, end), wanted)
        same = whole[first * SAMPLES : (first + count) * SAMPLES]
        if decoder.backend.row_independent:
            assert np.array_equal(part, same)
        np.testing.assert_allclose(part, same, atol=1e-6)


def test_less_context_changes_the_samples(decoder, reference):
    """The context is as short as it may be: one frame less is not enough."""
    whole, reach, first = decoder.decode(entries_of(reference)), decoder.context_frames, 14
    samples = slice(first * SAMPLES, (first + 1) * SAMPLES)
    for start, end in [(first - reach + 1, first + 8), (first - 8, first + reach)]:
        wanted = Rows((first - start) * SAMPLES, (first - start + 1) * SAMPLES)
        part = decoder.decode(entries_of(reference, start, end), wanted)
        assert not np.array_equal(part, whole[samples])


def test_any_range_of_samples_is_cut_from_the_whole(decoder, reference):
    entries = entries_of(reference, 0, 12)
    whole = decoder.decode(entries)
    rng = np.random.default_rng(3)
    for _ in range(30):
        first, end = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
        np.testing.assert_allclose(
            decoder.decode(entries, Rows(first, end)), whole[first:end], atol=1e-6
        )


def test_stages_end_with_the_samples(decoder, reference):
    entries = entries_of(reference, 0, 8)
    stages = [stage.shape for stage in decoder.stages(entries)]
    assert stages[-1] == (8 * SAMPLES,)
    assert len(stages) == 3 * 4 + 1


def test_no_frames_are_no_samples(decoder):
    nothing = np.empty(0, np.int32)
    assert decoder.decode([nothing] * 3).shape == (0,)


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e[:2],
        lambda e: [e[0], e[1][1:], e[2]],
        lambda e: [e[0], e[1], np.full_like(e[2], 32)],
        lambda e: [e[0] - 100, e[1], e[2]],
    ],
)
def test_entries_that_do_not_fit_are_refused(decoder, reference, change):
    with pytest.raises(ValueError):
        decoder.decode(change(entries_of(reference, 0, 3)))


@pytest.mark.parametrize("wanted", [Rows(-1, 3), Rows(5, 4), Rows(0, 3 * SAMPLES + 1)])
def test_a_range_outside_the_samples_is_refused(decoder, reference, wanted):
    with pytest.raises(ValueError):
        decoder.decode(entries_of(reference, 0, 3), wanted)


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / name, tmp_path)
    return tmp_path


def load(folder):
    return SnacDecoder(folder, load_backend("numpy"))


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"attn_window_size": 32}, "attention is not supported"),
        ({"depthwise": False}, "depthwise"),
        ({"vq_strides": [4, 3, 1]}, "multiple"),
        ({"vq_strides": []}, "last stride"),
        ({"decoder_rates": [64, 64, 64, 64]}, "too small|exceed"),
        ({"codebook_size": 33}, "config.json requires"),
        ({"decoder_dim": 64}, "config.json requires"),
        ({"decoder_rates": "fast"}, "decoder_rates"),
        ({"sampling_rate": 0}, "sampling_rate"),
        ({"noise": False}, "missing|not used"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, setting, problem):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    with pytest.raises(CheckpointError, match=problem):
        load(folder)


def rewrite(folder, change):
    store = TensorStore.open(folder)
    tensors = change({name: store.tensor(name).copy() for name in store})
    header, data = {}, b""
    for name, tensor in tensors.items():
        end = len(data) + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), end]}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_folded_and_earlier_names_of_weights_are_read(folder, reference):
    def plain(tensors):
        for name in [n for n in tensors if n.endswith("original0")]:
            base = name.removesuffix(".parametrizations.weight.original0")
            length = tensors.pop(name)
            direction = tensors.pop(f"{base}.parametrizations.weight.original1")
            if "out_proj" in base:
                norms = np.sqrt((direction.astype(float) ** 2).sum(axis=(1, 2), keepdims=True))
                tensors[f"{base}.weight"] = (direction * (length / norms)).astype(np.float32)
            else:
                tensors[f"{base}.weight_g"], tensors[f"{base}.weight_v"] = length, direction
        return tensors

    rewrite(folder, plain)
    np.testing.assert_allclose(
        load(folder).decode(entries_of(reference)), reference["audio"], atol=2e-6
    )


def test_a_tensor_that_is_not_used_is_refused(folder):
    rewrite(folder, lambda tensors: tensors | {"decoder.model.9.bias": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"decoder\.model\.9\.bias.*not used"):
        load(folder)


def test_a_direction_of_length_zero_is_refused(folder):
    name = "decoder.model.1.parametrizations.weight.original1"
    rewrite(folder, lambda tensors: tensors | {name: np.zeros_like(tensors[name])})
    with pytest.raises(CheckpointError, match="length 0"):
        load(folder)


def test_a_pickle_is_not_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"convert_snac\.py"):
        load(folder)
