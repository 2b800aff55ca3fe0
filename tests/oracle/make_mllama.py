"""Write the tiny checkpoint of mllama under tests/data/vision/mllama with transformers' results.

Run with a Python that has torch, transformers and Pillow::

    python tests/oracle/make_mllama.py [FOLDER]

The folder is a Hugging Face checkpoint beside ``reference.npz``. For each case ``i``: ``prompt_i``
(the text, with one token per image), ``pixels_i_j`` (uint8, one per image), ``ids_i`` (aspect
ratios), ``features_i`` (``[images, tokens, hidden]``, in the order of the tiles), ``logits_i`` (of
all rows), ``greedy_i``, ``margins_i``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

FOLDER = Path(__file__).resolve().parents[1] / "data" / "vision" / "mllama"
NEW_TOKENS = 16
VOCABULARY, IMAGE = 256, 256
TILES = 4
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)

SETTINGS = {
    "text": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [2, 5],
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "vision": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 48,
        "max_num_tiles": TILES,
    },
}

CASES = (
    (3, (16, 16), 6),
    ((20, 30), 4, (10, 40), 3),
    (2, (16, 40), (33, 12), 5),
    (2, (16, 3), (31, 30), 2, (64, 16), 1),
    (9,),
    (4, (30, 16)),
)
"""The parts of each prompt: a number of tokens of text, or height and width of an image."""


def make_model(settings: dict, seed: int) -> torch.nn.Module:
    """Random model whose logits are peaked: fan-in scaled matrices, uneven norms, open gates."""
    torch.manual_seed(seed)
    config = transformers.MllamaConfig(
        vision_config=settings["vision"], text_config=settings["text"], image_token_index=IMAGE
    )
    model = transformers.MllamaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name.rsplit(".", 1)[-1]:
                parameter.copy_(0.4 + torch.rand_like(parameter))
            elif "norm" in name:
                centre = 0.0 if name.endswith("bias") else 1.0
                parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif "embed" in name and "patch" not in name:
                parameter.copy_(torch.randn_like(parameter))
            else:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn_like(parameter) * fan_in**-0.5)
    model.generation_config.eos_token_id = [2, 3]
    return model


def make_case(parts: tuple, rng: np.random.Generator) -> dict:
    """A prompt of these parts, and its images."""
    pixels, prompt = [], []
    for part in parts:
        if isinstance(part, tuple):
            pixels.append(rng.integers(0, 256, (*part, 3)).astype(np.uint8))
            prompt.append([IMAGE])
        else:
            prompt.append(rng.integers(4, VOCABULARY, part))
    return {"prompt": np.concatenate(prompt).astype(np.int32), "pixels": pixels}


def processor_of(settings: dict) -> MllamaImageProcessorPil:
    """The image processor of transformers without torch."""
    side = settings["vision"]["image_size"]
    return MllamaImageProcessorPil(
        size={"height": side, "width": side},
        max_image_tiles=settings["vision"]["max_num_tiles"],
        image_mean=MEAN,
        image_std=STD,
    )


def images_of(settings: dict, case: dict) -> dict:
    """What the image processor makes of a case's images."""
    images = [[Image.fromarray(one) for one in case["pixels"]]]
    return processor_of(settings)(images, return_tensors="pt")


def inputs_of(settings: dict, case: dict, tokens: np.ndarray) -> dict:
    """Arguments of the model's forward for a case and its generated tokens."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    if not case["pixels"]:
        return {"input_ids": ids}
    done = images_of(settings, case)
    prompt = case["prompt"].tolist()
    mask = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(prompt, IMAGE)],
        num_tiles=done["num_tiles"],
        max_num_tiles=settings["vision"]["max_num_tiles"],
        length=len(prompt),
    )
    more = np.repeat(mask[:, -1:], len(tokens) - len(prompt), axis=1)
    return {
        "input_ids": ids,
        "pixel_values": done["pixel_values"],
        "aspect_ratio_ids": done["aspect_ratio_ids"],
        "aspect_ratio_mask": done["aspect_ratio_mask"],
        "cross_attention_mask": torch.from_numpy(np.concatenate([mask, more], axis=1)),
    }


@torch.no_grad()
def features_of(model: torch.nn.Module, settings: dict, case: dict) -> np.ndarray:
    """Projected features of each image, those of the tiles that it does not have included."""
    args = inputs_of(settings, case, case["prompt"])
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    states = model.model.vision_model(**{name: args[name] for name in names}).last_hidden_state
    out = model.model.multi_modal_projector(states)
    return out.reshape(len(case["pixels"]), -1, out.shape[-1]).numpy()


@torch.no_grad()
def reference_of(model: torch.nn.Module, settings: dict, case: dict) -> dict:
    """What transformers computes: logits of the prompt, and greedy tokens without a cache.

    ``margins``: the gap between the two best logits at each greedy token.
    """
    tokens, greedy, margins, logits = case["prompt"], [], [], None
    for _ in range(NEW_TOKENS):
        out = model(**inputs_of(settings, case, tokens), use_cache=False).logits[0].numpy()
        logits = out if logits is None else logits
        greedy.append(int(out[-1].argmax()))
        margins.append(float(np.diff(np.sort(out[-1])[-2:])[0]))
        tokens = np.append(tokens, greedy[-1]).astype(np.int32)
    return {
        "logits": logits,
        "greedy": np.array(greedy, np.int32),
        "margins": np.array(margins, np.float32),
    }


def save(model: torch.nn.Module, settings: dict, folder: Path) -> None:
    """Write the checkpoint with the image processor's settings."""
    model.save_pretrained(folder)
    side = settings["vision"]["image_size"]
    images = {
        "image_processor_type": "MllamaImageProcessor",
        "image_mean": MEAN,
        "image_std": STD,
        "rescale_factor": 1 / 255,
        "do_rescale": True,
        "do_normalize": True,
        "do_resize": True,
        "do_pad": True,
        "max_image_tiles": settings["vision"]["max_num_tiles"],
        "size": {"height": side, "width": side},
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))


def arrays_of(model: torch.nn.Module, settings: dict, case: dict) -> dict:
    """The prompt, the images and the results of a case by name."""
    arrays = {"prompt": case["prompt"], **reference_of(model, settings, case)}
    if case["pixels"]:
        arrays["ids"] = images_of(settings, case)["aspect_ratio_ids"][0].numpy().astype(np.int32)
        arrays["features"] = features_of(model, settings, case)
    return arrays


def main(folder: Path) -> None:
    """Write the checkpoint and its references."""
    model = make_model(SETTINGS, 0)
    save(model, SETTINGS, folder)
    rng = np.random.default_rng(0)
    arrays = {}
    for i, parts in enumerate(CASES):
        case = make_case(parts, rng)
        arrays |= {f"pixels_{i}_{j}": one for j, one in enumerate(case["pixels"])}
        arrays |= {f"{n}_{i}": array for n, array in arrays_of(model, SETTINGS, case).items()}
    np.savez_compressed(folder / "reference.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
