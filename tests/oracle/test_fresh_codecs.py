"""Fresh random SNAC codecs written by the snac package, decoded by both."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from baton.engine.audio.snac import Rows, SnacDecoder, SnacEncoder
from baton.engine.kernels.cuda.audio import CudaAudio
from baton.engine.kernels.load import load_backend

from ..cuda.host.builder import why_not
from ..cuda.host_device import HostDevice
from .makers import load_maker

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("snac", reason="snac is not installed; run make test-oracle")

ROOT = Path(__file__).resolve().parents[2]
SEED = int(np.random.SeedSequence().entropy % (1 << 31))


maker = load_maker("make_codecs")


@pytest.fixture(scope="module")
def codec():
    return maker.make_codec(SEED)


@pytest.fixture(scope="module")
def folder(codec, tmp_path_factory):
    """The codec in the published form, converted by the script for users."""
    folder = tmp_path_factory.mktemp("snac")
    (folder / "config.json").write_text(json.dumps(maker.CONFIG))
    torch.save(codec.state_dict(), folder / "pytorch_model.bin")
    command = [sys.executable, str(ROOT / "tools" / "convert_snac.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(params=["numpy", "cpu", "cuda"])
def backend(request, tmp_path):
    """All kernels; those of CUDA are executed on the CPU."""
    if request.param != "cuda":
        return load_backend(request.param)
    if reason := why_not():
        pytest.skip(reason)
    return CudaAudio(HostDevice(tmp_path))


def test_the_audio_is_the_packages(codec, folder, backend):
    decoder = SnacDecoder(folder, backend)
    entries = maker.entries_of(SEED)
    np.testing.assert_allclose(
        decoder.decode(entries), maker.audio_of(codec, entries), atol=1e-5, err_msg=f"seed {SEED}"
    )


def test_the_entries_are_the_packages(codec, folder):
    samples = maker.samples_of(SEED)
    theirs = maker.encoded(codec, samples)
    ours = SnacEncoder(folder).encode(samples.astype(np.float32) / 32768)
    equal = [np.mean(a == b) for a, b in zip(ours, theirs, strict=True)]
    assert min(equal) > 0.9, f"seed {SEED}"  # rounding may choose between two near entries


def test_a_windowed_stream_is_the_packages(codec, folder, backend):
    """Both decode the same windows; with full context they are also parts of the whole."""
    decoder = SnacDecoder(folder, backend)
    entries = maker.entries_of(SEED)
    samples, reach = decoder.config.frame_samples, decoder.context_frames
    whole = maker.audio_of(codec, entries)
    for before, after in [(1, 2), (reach, reach)]:
        for first in range(0, maker.FRAMES, 4):
            start = max(0, first - before)
            end = min(maker.FRAMES, first + 4 + after)
            window = maker.cut(entries, start, end)
            at = (first - start) * samples
            stop = at + (min(maker.FRAMES, first + 4) - first) * samples
            ours = decoder.decode(window, Rows(at, stop))
            theirs = maker.audio_of(codec, window)[at:stop]
            np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=f"seed {SEED}")
            if before == reach:
                part = whole[first * samples : first * samples + len(ours)]
                np.testing.assert_allclose(ours, part, atol=1e-5, err_msg=f"seed {SEED}")
