"""Write what transformers answers with the demo model that sees.

Run with a Python that has torch and transformers, after a training::

    python tests/oracle/make_demo_vision.py

For each case ``i``, ``tests/data/vision/demo.npz`` has ``prompt_i`` (expanded), ``pixels_i`` (uint8
``[112, 112, 3]``), ``greedy_i``, and ``margins_i``: the gap between the two best logits at each
greedy token. The pictures are of combinations held out of the training.
"""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import transformers

from baton.deploy.config import demo_vision_model_folder
from baton.tools.demo_model.sight_accuracy import SeeingModel
from baton.tools.demo_model.sights import AGAIN, sights, turn

FILE = Path(__file__).resolve().parents[1] / "data" / "vision" / "demo.npz"
CASES = 8
NEW_TOKENS = 24
SEED = 12


@torch.no_grad()
def reference(
    model: torch.nn.Module, processor: transformers.ProcessorMixin, prompt: np.ndarray, pixels
) -> dict[str, np.ndarray]:
    """Greedy tokens without a cache, also after the end of an answer."""
    made = processor(images=[pixels], return_tensors="pt", do_resize=False)
    tokens, margins = prompt.astype(np.int64), []
    for _ in range(NEW_TOKENS):
        ids = torch.from_numpy(tokens)[None]
        model.model.rope_deltas = None
        holders = (ids == model.config.image_token_id).int()
        out = model(input_ids=ids, mm_token_type_ids=holders, **made, use_cache=False).logits[0, -1]
        margins.append(float(np.diff(np.sort(out.numpy())[-2:])[0]))
        tokens = np.append(tokens, int(out.argmax()))
    return {
        "greedy": tokens[len(prompt) :].astype(np.int32),
        "margins": np.array(margins, np.float32),
    }


def main() -> None:
    """Ask both, and write transformers' answers."""
    folder = demo_vision_model_folder()
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder)
    seeing = SeeingModel(folder)
    rng = random.Random(SEED)
    arrays = {}
    for i, sight in enumerate(islice(sights(rng, new=True), CASES)):
        question = AGAIN if i == 0 else turn(rng, sight)[0]
        context, pixels = seeing.context(sight, question), sight.pixels()
        prompt = context.tokens.all[: context.prompt_length].astype(np.int32)
        arrays |= {f"prompt_{i}": prompt, f"pixels_{i}": pixels}
        for name, value in reference(model, processor, prompt, pixels).items():
            arrays[f"{name}_{i}"] = value
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
