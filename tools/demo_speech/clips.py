"""The training audio of the demo speech model: the ten digits by espeak-ng. The codec's config.

Needs the program ``espeak-ng`` (``apt-get install espeak-ng``) and numpy.
"""

from __future__ import annotations

import subprocess
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SAMPLE_RATE = 16_000
VOICE, WORDS_PER_MINUTE = "en-us+f2", 150
PROGRAM = ("espeak-ng", "-v", VOICE, "-s", str(WORDS_PER_MINUTE), "--stdout")
PROGRAM_RATE, PROGRAM_HEADER = 22_050, 44

CODEC_CONFIG: dict[str, Any] = {
    "sampling_rate": SAMPLE_RATE,
    "encoder_dim": 16,
    "encoder_rates": [5, 8, 8],
    "latent_dim": 128,
    "decoder_dim": 128,
    "decoder_rates": [8, 8, 5],
    "attn_window_size": None,
    "codebook_size": 128,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": False,
    "depthwise": True,
}
"""The codec, a SNAC; see :mod:`.codec`."""
FRAME_SAMPLES = 1280
"""Samples per frame of the codec, 80 ms. Clips are whole frames, so any sequence of them is."""
PEAK = 0.6
BEFORE, AFTER = int(0.02 * SAMPLE_RATE), int(0.05 * SAMPLE_RATE)
"""Samples of silence kept before and after a word."""
SILENT = 0.01
"""Loudness of silence, as a share of the loudest 10 ms of a word."""


def resampled(samples: F32) -> F32:
    """Return audio of espeak-ng's rate at :data:`SAMPLE_RATE`, cut off in the frequency domain."""
    count = len(samples) * SAMPLE_RATE // PROGRAM_RATE
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(samples))).astype(np.float32)


def spoken(word: str) -> F32:
    """Return a word spoken by espeak-ng, with silence around it, at :data:`SAMPLE_RATE`."""
    wav = subprocess.run([*PROGRAM, word], capture_output=True, check=True).stdout  # noqa: S603
    samples = np.frombuffer(wav[PROGRAM_HEADER:], "<i2").astype(np.float32)
    return resampled(samples / np.float32(32768))


def trimmed(samples: F32) -> F32:
    """Cut the silence around a word; end with zeros up to a whole number of frames."""
    window = SAMPLE_RATE // 100
    energy = np.convolve(samples**2, np.ones(window) / window, "same")
    loud = np.flatnonzero(np.sqrt(energy) > SILENT * np.sqrt(energy.max()))
    kept = samples[max(0, loud[0] - BEFORE) : loud[-1] + AFTER]
    clip = np.zeros(-(-len(kept) // FRAME_SAMPLES) * FRAME_SAMPLES, np.float32)
    clip[: len(kept)] = kept * (PEAK / np.abs(kept).max())
    return clip


def digit_clips() -> list[F32]:
    """Return the clips of the ten digits, each a whole number of frames long."""
    return [trimmed(spoken(word)) for word in WORDS]
