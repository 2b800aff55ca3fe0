"""Write the tiny SNAC codec under tests/data/codecs with the snac package's results.

Run with a Python that has torch and snac::

    python tests/oracle/make_codecs.py [FOLDER]

``reference.npz`` beside the weights holds the entries of thirty frames (``entries_0 ...``, coarsest
codebook first), their ``audio`` and the audio of some windows (``windows`` [n, 2], frames;
``window_0 ...``), decoded by the package with zero noise; and ``samples`` (16 bit) with the entries
that the package encodes them to (``encoded_0 ...``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

FOLDER = Path(__file__).resolve().parents[1] / "data" / "codecs"
FRAMES = 30
WINDOWS = ((0, 4), (1, 8), (13, 20), (25, 26))
CONFIG = {
    "sampling_rate": 8000,
    "encoder_dim": 4,
    "encoder_rates": [2, 3, 4],
    "latent_dim": None,
    "decoder_dim": 32,
    "decoder_rates": [4, 3, 2],
    "attn_window_size": None,
    "codebook_size": 32,
    "codebook_dim": 4,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}


def make_codec(seed: int) -> torch.nn.Module:
    """Random codec with uneven weights and snake factors, and with zero noise."""
    import snac
    from snac.layers import NoiseBlock

    NoiseBlock.forward = lambda _self, x: x
    torch.manual_seed(seed)
    codec = snac.SNAC(**CONFIG).eval()
    with torch.no_grad():
        for name, parameter in codec.named_parameters():
            if name.endswith("alpha"):
                parameter.copy_(0.3 + 2 * torch.rand_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            elif name.endswith("original0"):
                parameter.mul_(0.8 + 0.6 * torch.rand_like(parameter))
    return codec


@torch.no_grad()
def audio_of(codec: torch.nn.Module, entries: list[np.ndarray]) -> np.ndarray:
    """Return the package's samples."""
    return codec.decode([torch.from_numpy(e.astype(np.int64))[None] for e in entries])[0, 0].numpy()


def entries_of(seed: int) -> list[np.ndarray]:
    """Return random entries of thirty frames, per codebook."""
    rng = np.random.default_rng(seed)
    strides = CONFIG["vq_strides"]
    counts = [FRAMES * strides[0] // stride for stride in strides]
    return [rng.integers(0, CONFIG["codebook_size"], n).astype(np.int32) for n in counts]


def cut(entries: list[np.ndarray], first: int, end: int) -> list[np.ndarray]:
    """Return the entries of some frames."""
    return [e[first * len(e) // FRAMES : end * len(e) // FRAMES] for e in entries]


@torch.no_grad()
def encoded(codec: torch.nn.Module, samples: np.ndarray) -> list[np.ndarray]:
    """Return the package's entries of 16-bit samples, coarsest codebook first."""
    audio = torch.from_numpy(samples.astype(np.float32) / 32768)
    return [codes[0].numpy().astype(np.int32) for codes in codec.encode(audio[None, None])]


def samples_of(seed: int) -> np.ndarray:
    """Return a tone with noise, 16 bit, whose last frame is not full."""
    time = np.arange(FRAMES * 96 - 5) / CONFIG["sampling_rate"]
    tone = 0.5 * np.sin(600 * np.pi * time) * np.sin(6 * np.pi * time)
    noise = 0.1 * np.random.default_rng(seed).standard_normal(len(time))
    return (32767 * np.clip(tone + noise, -1, 1)).astype(np.int16)


def reference_of(codec: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Return entries, their audio, and the audio of windows decoded by themselves."""
    entries = entries_of(seed)
    arrays = {f"entries_{i}": e for i, e in enumerate(entries)}
    arrays["audio"] = audio_of(codec, entries)
    arrays["windows"] = np.array(WINDOWS, np.int32)
    for i, (first, end) in enumerate(WINDOWS):
        arrays[f"window_{i}"] = audio_of(codec, cut(entries, first, end))
    arrays["samples"] = samples_of(seed)
    arrays |= {f"encoded_{i}": e for i, e in enumerate(encoded(codec, arrays["samples"]))}
    return arrays


def main() -> None:
    """Write the codec."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else FOLDER) / "snac"
    folder.mkdir(parents=True, exist_ok=True)
    codec = make_codec(7)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    state = {name: value.contiguous().clone() for name, value in codec.state_dict().items()}
    safetensors.torch.save_file(state, folder / "model.safetensors")
    np.savez_compressed(folder / "reference.npz", **reference_of(codec, 8))


if __name__ == "__main__":
    main()
