"""Flux of diffusers; run by a Python that has torch and diffusers, without Baton.

``python pictures_peer.py FOLDER DTYPE`` makes the models of ``configs.json`` with random weights,
writes them to FOLDER, and answers each line of standard input, ``step`` or ``decode``, with the CPU
seconds of one measurement until the input ends. The result is in ``step.npy`` or ``decode.npy``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel


class Peer:
    """Both models and their inputs."""

    def __init__(self, folder: Path, dtype: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.kind = getattr(torch, dtype)
        configs = json.loads((folder / "configs.json").read_text())
        self.flux: Any = FluxTransformer2DModel(**configs["flux"]).eval().to(self.kind)
        self.vae: Any = AutoencoderKL(**configs["vae"]).eval().to(self.kind)
        self.flux.save_pretrained(folder / "transformer")
        self.vae.save_pretrained(folder / "vae")
        self.scale = configs["vae"]["scaling_factor"], configs["vae"]["shift_factor"]
        self.inputs = {
            name: torch.from_numpy(np.load(folder / f"{name}.npy")).to(self.kind)
            for name in ("latents", "prompts", "pooled", "small")
        }
        side = configs["side"]
        ids = torch.zeros(side, side, 3)
        ids[..., 1] = torch.arange(side)[:, None]
        ids[..., 2] = torch.arange(side)
        self.ids = ids.reshape(-1, 3), torch.zeros(configs["text"], 3)

    def step(self) -> torch.Tensor:
        """Noise of one step at sigma 0.7."""
        return self.flux(
            hidden_states=self.inputs["latents"],
            encoder_hidden_states=self.inputs["prompts"],
            pooled_projections=self.inputs["pooled"],
            timestep=torch.tensor([0.7], dtype=self.kind),
            guidance=torch.tensor([3.5]),
            img_ids=self.ids[0],
            txt_ids=self.ids[1],
            return_dict=False,
        )[0]

    def decode(self) -> torch.Tensor:
        """Pixels ``[H, W, 3]`` of latents."""
        factor, shift = self.scale
        latents = self.inputs["small"].permute(2, 0, 1)[None] / factor + shift
        return self.vae.decode(latents, return_dict=False)[0][0].permute(1, 2, 0)


def main() -> None:
    """Answer until the input ends."""
    folder = Path(sys.argv[1])
    peer = Peer(folder, sys.argv[2])
    print(sum(p.numel() for p in peer.flux.parameters()), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            name = line.strip()
            began = time.process_time()
            result = peer.step() if name == "step" else peer.decode()
            spent = time.process_time() - began
            np.save(folder / f"{name}.npy", result.float().numpy())
            print(spent, flush=True)


if __name__ == "__main__":
    main()
