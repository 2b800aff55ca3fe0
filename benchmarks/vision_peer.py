"""One image and a prompt on transformers; run by a Python that has torch, without Baton.

``python vision_peer.py FOLDER SIDE PATCH IMAGE_TOKEN BEFORE AFTER`` answers each line of standard
input, ``tower`` or ``prompt``, with CPU seconds, until the input ends.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers


def main() -> None:
    """Answer until the input ends."""
    folder, *numbers = sys.argv[1:]
    side, patch, image, before, after = map(int, numbers)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = transformers.Qwen2_5_VLForConditionalGeneration
    model: Any = kind.from_pretrained(folder, dtype=torch.float32).eval()
    rows = side // patch
    grid = torch.tensor([[1, rows, rows]])
    patches = torch.randn(rows * rows, 3 * 2 * patch * patch)
    text = torch.randint(4, 3000, (1, before + after))
    shown = torch.full((1, rows * rows // 4), image)
    ids = torch.cat([text[:, :before], shown, text[:, before:]], dim=1)
    with torch.inference_mode():
        for line in sys.stdin:
            model.model.rope_deltas = None
            began = time.process_time()
            if line.strip() == "tower":
                model.model.visual(patches, grid_thw=grid)
            else:
                model(
                    input_ids=ids,
                    mm_token_type_ids=(ids == image).int(),
                    pixel_values=patches,
                    image_grid_thw=grid,
                    use_cache=True,
                    logits_to_keep=1,
                )
            print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main()
