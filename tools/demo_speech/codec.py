"""Train the codec: ``python -m baton.tools.demo_speech.codec --out DIR``.

Needs torch, safetensors, snac and espeak-ng. The decoder and the codebooks of a SNAC of the snac
package learn the clips of the ten digits by heart, in random order. The entries of a clip are
chosen before: clusters of its log-mel spectra, and of what coarser codebooks left over of them. So
no encoder is trained.

The loss is the distance of log-mel spectra at five resolutions, as of DAC (Kumar et al., 2023,
"High-Fidelity Audio Compression with Improved RVQGAN"), and of the samples.

Writes ``snac/config.json`` and ``snac/model.safetensors`` (decoder and codebooks, float16), and
``entries.npz``, from which :mod:`.voice` trains: the entries of each clip by codebook.
"""
# mypy: disable-error-code="no-any-return"
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from .clips import CODEC_CONFIG, F32, WORDS, digit_clips
from .mel import FLOOR, mel_matrix

I64 = npt.NDArray[np.int64]

HOP = 320
"""Samples per latent step."""
FEATURE_WINDOW = 1024
"""Samples per spectrum from which the entries follow."""
UNUSED = "encoder."
CLIPS_PER_STEP = (1, 2)
LEARNING_RATE = 2e-3
MELS = {128: 10, 256: 20, 512: 40, 1024: 64, 2048: 80}
"""Mel bands of each length of the spectra's window."""
WAVE_WEIGHT = 15.0

Module = Any  # snac has no types


# ------------------------------------------------------------------------------------ loss


class SpectralLoss:
    """Distance of two signals ``[samples]``: log-mel spectra and samples."""

    def __init__(self) -> None:
        self._scales = [
            (n, torch.from_numpy(mel_matrix(n, b)), torch.hann_window(n)) for n, b in MELS.items()
        ]

    def log_mels(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the base-10 log-mel spectra ``[bands, steps]`` of each resolution."""
        found = []
        for size, matrix, window in self._scales:
            spectrum = torch.stft(x, size, size // 4, window=window, return_complex=True)
            mels = matrix @ spectrum.abs() * (2 / window.sum())
            found.append(mels.clamp_min(FLOOR).log10())
        return found

    def __call__(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the sum over the resolutions of the mean absolute distances."""
        pairs = zip(self.log_mels(made), self.log_mels(wanted), strict=True)
        mels = sum(((a - b).abs().mean() for a, b in pairs), torch.zeros(()))
        return mels + WAVE_WEIGHT * (made - wanted).abs().mean()


# --------------------------------------------------------------------------------- entries


def features(clip: F32) -> F32:
    """Return log-mel spectra around each latent step of a clip, ``[steps, bands]``."""
    spectra = SpectralLoss().log_mels(torch.from_numpy(clip))[list(MELS).index(FEATURE_WINDOW)]
    rows = torch.nn.functional.interpolate(spectra[None], len(clip) // HOP, mode="area")[0].T
    return np.ascontiguousarray(rows.numpy())


def clusters(vectors: F32, count: int) -> tuple[I64, F32]:
    """Return the cluster of each vector ``[n, dim]`` and the centres; k-means, farthest first."""
    chosen = [int(np.linalg.norm(vectors, axis=1).argmax())]
    nearest = np.full(len(vectors), np.inf)
    while len(chosen) < min(count, len(vectors)):
        distances = np.linalg.norm(vectors - vectors[chosen[-1]], axis=1)
        nearest = np.minimum(nearest, distances)
        chosen.append(int(nearest.argmax()))
    centres = vectors[chosen]
    ids = np.zeros(len(vectors), np.int64)
    for _ in range(20):
        ids = np.linalg.norm(vectors[:, None] - centres, axis=2).argmin(axis=1)
        for i in set(ids.tolist()):
            centres[i] = vectors[ids == i].mean(axis=0)
    return ids, centres


def choose_entries(clips: list[F32]) -> tuple[list[list[I64]], list[F32]]:
    """Return the entries of each clip by codebook, and each codebook's first vectors.

    A codebook's centres are those of the log-mel spectra that the coarser ones left over.
    """
    rows = [features(clip) for clip in clips]
    rest = np.concatenate(rows)
    rest -= rest.mean(axis=0)
    entries: list[list[I64]] = [[] for _ in clips]
    tables = []
    for stride in CODEC_CONFIG["vq_strides"]:
        pooled = rest.reshape(-1, stride, rest.shape[1]).mean(axis=1)
        ids, centres = clusters(pooled, CODEC_CONFIG["codebook_size"])
        rest = rest - np.repeat(centres[ids], stride, axis=0)
        own = np.split(ids, np.cumsum([len(r) // stride for r in rows])[:-1])
        for mine, part in zip(entries, own, strict=True):
            mine.append(part)
        main = np.linalg.svd(centres, full_matrices=False)[2][: CODEC_CONFIG["codebook_dim"]]
        table = np.zeros((CODEC_CONFIG["codebook_size"], CODEC_CONFIG["codebook_dim"]), np.float32)
        table[: len(centres)] = centres @ main.T
        tables.append(table / table[: len(centres)].std(axis=0))
    return entries, tables


# -------------------------------------------------------------------------------- training


class Training:
    """The codec, the clips with their entries, and the optimizer."""

    def __init__(self, clips: list[F32]) -> None:
        import snac

        self.codec: Module = snac.SNAC(**CODEC_CONFIG)
        self.entries, tables = choose_entries(clips)
        for book, table in zip(self.codec.quantizer.quantizers, tables, strict=True):
            book.codebook.weight.data.copy_(torch.from_numpy(table))
        self._clips = [torch.from_numpy(clip) for clip in clips]
        self._loss = SpectralLoss()
        self._parameters = [
            p for name, p in self.codec.named_parameters() if not name.startswith(UNUSED)
        ]
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=LEARNING_RATE, betas=(0.8, 0.99), weight_decay=0.0
        )

    def spoken(self, order: list[int]) -> torch.Tensor:
        """Return the codec's samples for some clips in a row."""
        books = zip(*(self.entries[i] for i in order), strict=True)
        codes = [torch.from_numpy(np.concatenate(book))[None] for book in books]
        return self.codec.decode(codes)[0, 0]

    def step(self, order: list[int], factor: float) -> float:
        """Update the parameters once; return the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        loss = self._loss(self.spoken(order), torch.cat([self._clips[i] for i in order]))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        torch.nn.utils.clip_grad_norm_(self._parameters, 5.0)
        self.optimizer.step()
        return float(loss.item())


def train(args: argparse.Namespace) -> None:
    """Train for ``args.minutes`` of CPU time; write the codec and the entries."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    training = Training(digit_clips())
    if args.resume:
        state = load_file(args.out / "snac/model.safetensors")
        training.codec.load_state_dict(state, strict=False)  # the encoder is missing
    began, step, mean, progress = time.process_time(), 0, 0.0, 0.0
    while progress < 1.0:
        order = rng.choice(len(WORDS), rng.choice(CLIPS_PER_STEP), replace=False).tolist()
        loss = training.step(order, max(0.02, 1.0 - progress))
        mean = 0.98 * mean + 0.02 * loss if mean else loss
        step += 1
        spent = (time.process_time() - began) / 60
        progress = spent / args.minutes
        if step % 100 == 0:
            print(f"{spent:6.2f} min  step {step}  loss {mean:.4f}", flush=True)  # noqa: T201
            save(args.out, training)
    save(args.out, training)


def save(out: Path, training: Training) -> None:
    """Write the decoder and the codebooks, and the entries of the clips."""
    (out / "snac").mkdir(parents=True, exist_ok=True)
    (out / "snac/config.json").write_text(
        json.dumps(CODEC_CONFIG, indent=2) + "\n", encoding="utf-8"
    )
    state = {
        name: tensor.half().contiguous()
        for name, tensor in training.codec.state_dict().items()
        if not name.startswith(UNUSED) and ".in_proj." not in name
    }
    save_file(state, out / "snac/model.safetensors", metadata={"format": "pt"})
    (out / "snac/model.safetensors").chmod(0o644)
    arrays: dict[str, Any] = {
        f"{word}_{book}": ids
        for word, books in zip(WORDS, training.entries, strict=True)
        for book, ids in enumerate(books)
    }
    np.savez_compressed(out / "entries.npz", **arrays)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="train the codec of the demo speech model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU minutes of training")
    parser.add_argument("--resume", action="store_true", help="continue with the codec in --out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
