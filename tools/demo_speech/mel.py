"""Log-mel spectra of speech at 16 kHz, and their distance."""

from __future__ import annotations

import numpy as np

from .clips import F32, SAMPLE_RATE

FLOOR = 1e-4
"""Smallest mel magnitude that counts: 80 dB below a full sine."""
WINDOW, BANDS = 1024, 40


def mel_matrix(window: int, bands: int) -> F32:
    """Return triangular filters ``[bands, window / 2 + 1]``, evenly spaced on the mel scale."""
    top = 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(window, 1 / SAMPLE_RATE)
    width = np.maximum(np.diff(edges), bins[1])  # a filter has at least one bin
    rise = (bins - edges[:-2, None]) / width[:-1, None]
    fall = (edges[2:, None] - bins) / width[1:, None]
    filters: F32 = np.clip(np.minimum(rise, fall), 0, None).astype(np.float32)
    return filters


def log_mels(samples: F32) -> F32:
    """Return base-10 log-mel magnitudes ``[steps, BANDS]``, four steps per window."""
    hop = WINDOW // 4
    padded = np.pad(samples, WINDOW // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::hop]
    taper = np.hanning(WINDOW)
    magnitudes = np.abs(np.fft.rfft(frames * taper)) * (2 / taper.sum())
    mels = magnitudes @ mel_matrix(WINDOW, BANDS).T
    found: F32 = np.log10(np.maximum(mels, FLOOR)).astype(np.float32)
    return found


def distance(first: F32, second: F32) -> float:
    """Return the mean distance of two log-mel spectra in dB, over the steps that both have."""
    steps = min(len(first), len(second))
    return float(20 * np.abs(first[:steps] - second[:steps]).mean())
