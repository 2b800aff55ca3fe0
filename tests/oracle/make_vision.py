"""Write the tiny checkpoints with vision under tests/data/vision with transformers' results.

Run with a Python that has torch and transformers::

    python tests/oracle/make_vision.py [FOLDER]

Every folder is a Hugging Face checkpoint beside ``reference.npz``. For each case ``i``:
``prompt_i``, ``grids_i`` (patches), ``pixels_i_j`` (uint8, one per image), ``features_i_j``,
``deep_i_j`` (``[layers, tokens, hidden]``), ``delta_i``, ``positions_i`` (``[3, n]``),
``logits_i`` (of all rows), ``greedy_i``, ``margins_i``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).resolve().parents[1] / "data" / "vision"
NEW_TOKENS = 16
IMAGE, VIDEO, START, END = 250, 251, 252, 253
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)

TEXT = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2_5_VL = {
    "family": "Qwen2_5_VL",
    "text": {
        **TEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        },
    },
    "vision": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 32,
    },
}
QWEN3_VL = {
    "family": "Qwen3VL",
    "text": {
        **TEXT,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    },
    "vision": {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
        "out_hidden_size": 32,
    },
}
MODELS = {"qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL}

CASES = (
    ((4, 6),),
    ((8, 6), (2, 2)),
    ((6, 10), (4, 4), (4, 4)),
    ((2, 8), (12, 4), (4, 6), (6, 6)),
)
"""Grids of the images of each case, in patches."""


def make_model(settings: dict, seed: int) -> torch.nn.Module:
    """Random model whose logits are peaked: fan-in scaled matrices, uneven norms and biases."""
    torch.manual_seed(seed)
    family = settings["family"]
    config = getattr(transformers, f"{family}Config")(
        text_config=settings["text"],
        vision_config=settings["vision"],
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_q." in name:
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif "embed_tokens" in name or "pos_embed" in name:
                parameter.copy_(torch.randn_like(parameter))
            else:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn_like(parameter) * fan_in**-0.5)
        model.lm_head.weight[IMAGE:] = 0  # a generated placeholder would need another image
    model.generation_config.eos_token_id = [2, 3]
    return model


def make_case(settings: dict, grids: tuple, rng: np.random.Generator) -> dict:
    """A prompt with images of these grids: text, start, placeholders, end, text."""
    side = settings["vision"]["patch_size"]
    pixels = [
        rng.integers(0, 256, (rows * side, columns * side, 3)).astype(np.uint8)
        for rows, columns in grids
    ]
    parts = [rng.integers(4, 240, 5)]
    for rows, columns in grids:
        parts += [[START], [IMAGE] * (rows * columns // 4), [END], rng.integers(4, 240, 3)]
    prompt = np.concatenate([np.asarray(part) for part in parts]).astype(np.int32)
    full = np.array([[1, *grid] for grid in grids], np.int32)
    return {"prompt": prompt, "grids": full, "pixels": pixels}


def patches_of(pixels: np.ndarray, side: int, merge: int = 2, times: int = 2) -> np.ndarray:
    """Normalised patches as the processor of transformers lays them out."""
    image = torch.from_numpy(pixels).permute(2, 0, 1).float()
    mean = torch.tensor(MEAN) * 255.0
    std = torch.tensor(STD) * 255.0
    image = (image - mean[:, None, None]) / std[:, None, None]
    channels, height, width = image.shape
    rows, columns = height // side, width // side
    frames = image[None].expand(times, -1, -1, -1)
    cut = frames.reshape(
        1, times, channels, rows // merge, merge, side, columns // merge, merge, side
    )
    cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(rows * columns, -1)


def inputs_of(settings: dict, case: dict, tokens: np.ndarray) -> dict:
    """Arguments of the model's forward for a case."""
    side = settings["vision"]["patch_size"]
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.cat([patches_of(p, side) for p in case["pixels"]]),
        "image_grid_thw": torch.from_numpy(case["grids"].astype(np.int64)),
    }


@torch.no_grad()
def features_of(
    model: torch.nn.Module, settings: dict, case: dict
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Features of each image, and those for the decoder's first layers."""
    side = settings["vision"]["patch_size"]
    pixels = torch.cat([patches_of(p, side) for p in case["pixels"]])
    grids = torch.from_numpy(case["grids"].astype(np.int64))
    out = model.model.visual(pixels, grid_thw=grids)
    counts = (case["grids"][:, 1] * case["grids"][:, 2] // 4).tolist()
    merged = [part.numpy() for part in torch.split(out.pooler_output, counts)]
    layers = getattr(out, "deepstack_features", None) or []
    split = [torch.split(layer, counts) for layer in layers]
    deep = [np.stack([s[j].numpy() for s in split]) for j in range(len(counts)) if split]
    return merged, deep


@torch.no_grad()
def reference_of(model: torch.nn.Module, settings: dict, case: dict) -> dict:
    """What transformers computes: logits, greedy tokens without a cache, rope positions.

    ``margins``: the gap between the two best logits at each greedy token.
    """
    tokens, greedy, margins = case["prompt"], [], []
    args = inputs_of(settings, case, tokens)
    positions, delta = model.model.get_rope_index(
        args["input_ids"],
        mm_token_type_ids=args["mm_token_type_ids"],
        image_grid_thw=args["image_grid_thw"],
    )
    logits = None
    for _ in range(NEW_TOKENS):
        model.model.rope_deltas = None
        out = model(**inputs_of(settings, case, tokens), use_cache=False).logits[0].numpy()
        logits = out if logits is None else logits
        greedy.append(int(out[-1].argmax()))
        margins.append(float(np.diff(np.sort(out[-1])[-2:])[0]))
        tokens = np.append(tokens, greedy[-1]).astype(np.int32)
    return {
        "logits": logits,
        "greedy": np.array(greedy, np.int32),
        "margins": np.array(margins, np.float32),
        "positions": positions[:, 0].numpy().astype(np.int32),
        "delta": np.array([int(delta)], np.int32),
    }


def save(model: torch.nn.Module, folder: Path) -> None:
    """Write the checkpoint with the image processor's settings."""
    model.save_pretrained(folder)
    settings = {
        "image_mean": MEAN,
        "image_std": STD,
        "rescale_factor": 1 / 255,
        "do_rescale": True,
        "do_normalize": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def main(folder: Path) -> None:
    """Write all checkpoints and their references."""
    for seed, (name, settings) in enumerate(MODELS.items()):
        model = make_model(settings, seed)
        save(model, folder / name)
        rng = np.random.default_rng(seed)
        arrays = {}
        for i, grids in enumerate(CASES):
            case = make_case(settings, grids, rng)
            arrays |= {f"prompt_{i}": case["prompt"], f"grids_{i}": case["grids"]}
            for j, pixels in enumerate(case["pixels"]):
                arrays[f"pixels_{i}_{j}"] = pixels
            merged, deep = features_of(model, settings, case)
            arrays |= {f"features_{i}_{j}": part for j, part in enumerate(merged)}
            arrays |= {f"deep_{i}_{j}": part for j, part in enumerate(deep)}
            for key, value in reference_of(model, settings, case).items():
                arrays[f"{key}_{i}"] = value
        np.savez_compressed(folder / name / "reference.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
