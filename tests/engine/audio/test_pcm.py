"""16-bit samples and WAV headers, read back by the standard library."""

import io
import wave

import numpy as np

from baton.engine.audio.pcm import pcm16, wav_header


def test_samples_are_rounded_and_clipped():
    samples = np.array([0, 1, -1, 0.5, 2, -3, 1e-5, 1.6e-5], np.float32)
    found = np.frombuffer(pcm16(samples), "<i2").tolist()
    assert found == [0, 32767, -32767, 16384, 32767, -32767, 0, 1]


def test_a_wav_file_is_read_back():
    data = pcm16(np.linspace(-1, 1, 99))
    with wave.open(io.BytesIO(wav_header(24000, len(data)) + data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        assert file.getnframes() == 99
        assert file.readframes(99) == data


def test_a_header_may_leave_the_length_open():
    with wave.open(io.BytesIO(wav_header(8000) + bytes(20))) as file:
        assert file.readframes(10) == bytes(20)
