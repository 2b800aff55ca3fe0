"""A step of a Flux transformer and the decoding of its picture beside diffusers, on one core.

The transformer has 88M parameters (hidden 512, 8 heads, 4 double and 12 single blocks) and computes
256 text and 1024 image tokens: a picture of 512x512 pixels. The VAE has the widths of Flux's own,
divided by 2. The peer writes both with random weights, and both sides read them. CPU seconds, best
of several rounds taken in turn; the results of both sides are compared. The first preview is the
engine's alone: a step, and the preview that it predicts.

``python -m baton.benchmarks.pictures --peer-python PATH``; PATH has torch and diffusers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baton.engine.kernels.load import load_backend
from baton.engine.pictures.configs import (
    ClipConfig,
    FluxConfig,
    SchedulerConfig,
    T5Config,
    VaeConfig,
)
from baton.engine.pictures.family import StepInputs
from baton.engine.pictures.flux_family import FluxFamily
from baton.engine.pictures.folder import PictureFolder
from baton.engine.pictures.pipeline import Denoiser
from baton.proto.contexts.pixels import PixelContext, encode_png
from baton.proto.contexts.tokens import TokenBuffer
from baton.runtime.process.os_settings import limit_blas_threads

from .scratch import scratch_folder

FLUX: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 4,
    "num_single_layers": 12,
    "attention_head_dim": 64,
    "num_attention_heads": 8,
    "joint_attention_dim": 1024,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (8, 28, 28),
}
VAE: dict[str, Any] = {
    "block_out_channels": (64, 128, 256, 256),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TEXT, SIDE, DECODED_SIDE = 256, 32, 32
MEASURES = ("step", "decode")
SCALE = 2 * 2 ** (len(VAE["block_out_channels"]) - 1)


def write_inputs(folder: Path) -> dict[str, np.ndarray]:
    """Write the configs and one sample for both sides."""
    rng = np.random.default_rng(0)
    flux = msgspec.convert(FLUX, FluxConfig)
    shapes = {
        "latents": (1, SIDE * SIDE, flux.in_channels),
        "prompts": (1, TEXT, flux.joint_attention_dim),
        "pooled": (1, flux.pooled_projection_dim),
        "small": (DECODED_SIDE, DECODED_SIDE, VAE["latent_channels"]),
    }
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    sizes = {"text": TEXT, "side": SIDE}
    (folder / "configs.json").write_text(json.dumps({"flux": FLUX, "vae": VAE, **sizes}))
    return arrays


class Engine:
    """Baton's side."""

    def __init__(self, folder: Path, arrays: dict[str, np.ndarray]) -> None:
        backend = load_backend()
        flux, vae = msgspec.convert(FLUX, FluxConfig), msgspec.convert(VAE, VaeConfig)
        family = FluxFamily(ClipConfig(), T5Config(), flux)
        self._denoiser = Denoiser(PictureFolder(folder, family, vae, SchedulerConfig()), backend)
        self._flux, self._vae = self._denoiser.transformer, self._denoiser.vae
        self._state = {"prompt": arrays["prompts"][0], "pooled": arrays["pooled"][0]}
        self._small = arrays["small"]
        self._inputs = StepInputs(
            latents=list(arrays["latents"]),
            prompts=list(arrays["prompts"]),
            pooled=[arrays["pooled"]],
            timesteps=np.array([700.0], np.float32),
            guidance=np.array([3.5], np.float32),
            rows=SIDE,
            columns=SIDE,
        )

    def seconds(self, measure: str) -> tuple[float, np.ndarray]:
        """CPU seconds of one measurement, and its result."""
        began = time.process_time()
        if measure == "step":
            result = np.stack(self._flux.execute(self._inputs))
        else:
            result = self._vae.image(self._small)
        return time.process_time() - began, result

    def first_preview(self) -> float:
        """CPU seconds from the encoded prompt to the first preview, after one step."""
        tokens, tokens_2 = (TokenBuffer(np.zeros(count, np.int64)) for count in (1, TEXT))
        context = PixelContext(
            tokens=tokens, tokens_2=tokens_2, height=SIDE * SCALE, width=SIDE * SCALE,
            num_inference_steps=4,
        )  # fmt: skip
        began = time.process_time()
        drawing = self._denoiser.start(context, self._state)
        self._denoiser.step([drawing])
        encode_png(self._denoiser.preview(drawing))
        return time.process_time() - began


class Peer:
    """diffusers in another process. It writes the models."""

    def __init__(self, python: str, folder: Path, dtype: str) -> None:
        script = Path(__file__).with_name("pictures_peer.py")
        self._folder = folder
        self._process = subprocess.Popen(
            [python, "-P", "-W", "ignore", str(script), str(folder), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.parameters = int(self._line())

    def seconds(self, measure: str) -> tuple[float, np.ndarray]:
        """CPU seconds of one measurement, and its result."""
        if self._process.stdin is None:
            raise RuntimeError("the peer has no input")
        self._process.stdin.write(f"{measure}\n")
        self._process.stdin.flush()
        seconds = float(self._line())
        return seconds, np.load(self._folder / f"{measure}.npy")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"the peer ended with code {self._process.wait()}")
        return line


def measure(python: str, folder: Path, dtype: str, rounds: int) -> None:
    """Print one row per measurement."""
    arrays = write_inputs(folder)
    peer = Peer(python, folder, dtype)
    try:
        engine = Engine(folder, arrays)
        for name in MEASURES:
            pairs = []
            for _ in range(rounds + 1):  # the first round warms
                (ours, result), (theirs, expected) = engine.seconds(name), peer.seconds(name)
                pairs.append((ours, theirs))
            ours, theirs = (min(column) for column in zip(*pairs[1:], strict=True))
            apart = np.abs(result.reshape(expected.shape) - expected).max()
            print(
                f"{dtype:10}{name:8}{ours * 1e3:>12.0f}{theirs * 1e3:>14.0f}"
                f"{theirs / ours:>8.2f}x  largest difference {apart:.1e}",
                flush=True,
            )
        preview = min(engine.first_preview() for _ in range(rounds))
        print(f"{dtype:10}{'preview':8}{preview * 1e3:>12.0f}", flush=True)
    finally:
        peer.close()


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="a Python with torch and diffusers")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not options.peer_python:
        print("needs --peer-python: diffusers writes the models that are measured")
        return 0
    limit_blas_threads(1)
    print(f"{'':18}{'engine ms':>12}{'diffusers ms':>14}")
    with scratch_folder() as scratch:
        for dtype in options.dtypes.split(","):
            measure(options.peer_python, scratch / dtype, dtype, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
