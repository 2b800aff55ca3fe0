"""Write ``tests/data/demo_flux.npz``: what diffusers draws with the demo Flux model.

Run with a Python that has torch, transformers, diffusers and this tree::

    python tests/oracle/make_demo_flux.py [FILE]

``prompt`` is the prompt as UTF-8, ``start`` the first noise ``[tokens, channels]`` and ``pixels``
the picture, uint8 ``[SIDE, SIDE, 3]``. Texts have 512 tokens for T5, as the engine pads them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline

from baton.deploy.config import demo_flux_folder
from baton.tools.demo_flux.scenes import SIDE

FILE = Path(__file__).resolve().parents[1] / "data" / "demo_flux.npz"
PROMPT = "a blue square left of a red circle"
SEED, STEPS = 3, 12


@torch.no_grad()
def main() -> None:
    pipeline = FluxPipeline.from_pretrained(
        demo_flux_folder(),
        torch_dtype=torch.float32,
        low_cpu_mem_usage=False,  # the VAE has no encoder in the file; it would stay without memory
    )
    pipeline.set_progress_bar_config(disable=True)
    unit = 2 * pipeline.vae_scale_factor
    shape = (1, (SIDE // unit) ** 2, pipeline.transformer.config.in_channels)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    # The pipeline would pad the CLIP tokens to 77, more than this encoder has places for.
    clip = pipeline.tokenizer(PROMPT, return_tensors="pt").input_ids
    pixels = pipeline(
        pooled_prompt_embeds=pipeline.text_encoder(clip).pooler_output,
        prompt_embeds=pipeline._get_t5_prompt_embeds(PROMPT, max_sequence_length=512),
        latents=start,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        output_type="np",
    ).images[0]
    np.savez_compressed(
        Path(sys.argv[1]) if len(sys.argv) > 1 else FILE,
        prompt=np.frombuffer(PROMPT.encode(), np.uint8),
        steps=np.array(STEPS),
        start=start[0].numpy(),
        pixels=np.rint(pixels * 255).astype(np.uint8),
    )


if __name__ == "__main__":
    main()
