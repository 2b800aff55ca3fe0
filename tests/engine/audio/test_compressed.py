"""MP3, Opus and AAC of a tone, decoded again."""

import io

import numpy as np
import pytest

from baton.engine.audio.compressed import CODECS, CompressedEncoder

av = pytest.importorskip("av", reason="needs the extra audio")
TONE_HZ = 440


@pytest.mark.parametrize("rate", [8000, 24000])
@pytest.mark.parametrize("form", CODECS)
def test_a_tone_stays_a_tone(form, rate):
    """Whatever the parts are; the first bytes come before the end."""
    time = np.arange(2 * rate) / rate
    samples = (np.sin(2 * np.pi * TONE_HZ * time) * 12000).astype(np.int16)
    encoder = CompressedEncoder(form, rate)
    parts = [encoder.encode(samples[at : at + 777]) for at in range(0, len(samples), 777)]
    early = b"".join(parts[: len(parts) // 2])
    assert len(early) > 300
    file = av.open(io.BytesIO(b"".join([*parts, encoder.finish()])))
    heard = np.concatenate([frame.to_ndarray().reshape(-1) for frame in file.decode(audio=0)])
    heard_rate = file.streams.audio[0].rate
    peak = np.argmax(np.abs(np.fft.rfft(heard.astype(float)))) * heard_rate / len(heard)
    assert abs(peak - TONE_HZ) < 2
    assert 2.0 <= len(heard) / heard_rate < 2.3
