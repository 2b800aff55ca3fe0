"""Write the tiny Z-Image model under tests/data/pictures with diffusers' results.

Run with a Python that has torch, transformers and diffusers::

    python tests/oracle/make_zimage.py [FOLDER]

The folder is a whole pipeline in the diffusers layout beside ``reference.npz``. For each of the
cases in ``CASES``: tokens of prompt and negative prompt (``NAME_tokens``, ``NAME_negative_tokens``)
and their states (``NAME_prompt``, ``NAME_negative_prompt``), the first noise (``NAME_noise``), the
latents before, amid and after the steps (``NAME_start``, ``NAME_middle``, ``NAME_latents``), packed
as ``[tokens, channels * 4]``, sigmas and pixels (``NAME_pixels``).

The embedding of times has a fixed width of 1024. To keep the repository small, one in 16 of its
first weights is not zero, and all weights are float16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)

sys.path.insert(0, str(Path(__file__).parent))
from make_pictures import make_vae, randomise, save

FOLDER = Path(__file__).resolve().parents[1] / "data" / "pictures" / "zimage"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"height": 32, "width": 48, "guidance_scale": 0.0, "prompt": "a red cube"},
    "guided": {
        "height": 32, "width": 32, "guidance_scale": 3.0, "prompt": "two cats, one hat",
        "negative_prompt": "a dog",
    },
    "limited": {
        "height": 64, "width": 32, "guidance_scale": 4.0, "cfg_normalization": 0.9,
        "cfg_truncation": 0.2, "prompt": "A house by the sea, in the evening; nobody is there",
    },
}  # fmt: skip


def chat_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen3's special tokens and a template like Qwen3's."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("u", "s"), ("us", "e"), ("use", "r"), ("a", "s"), ("as", "s"), ("Ġ", "c")]
    words = [*letters, *("".join(pair) for pair in merges), *SPECIAL]
    vocab = {word: index for index, word in enumerate(words)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens([tokenizers.AddedToken(word, normalized=False) for word in SPECIAL])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[2]
    )
    made.chat_template = TEMPLATE
    return made


def make_text(seed: int, **changes: Any) -> torch.nn.Module:
    """A Qwen3 without a head."""
    config = {
        "vocab_size": 267, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "max_position_embeddings": 1024, "tie_word_embeddings": False,
    }  # fmt: skip
    return randomise(
        transformers.Qwen3Model(transformers.Qwen3Config(**{**config, **changes})), seed
    )


def make_transformer(seed: int, **changes: Any) -> torch.nn.Module:
    """A Z-Image transformer."""
    config = {
        "in_channels": 4, "dim": 24, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2,
        "n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [4, 4, 4],
    }  # fmt: skip
    model = randomise(ZImageTransformer2DModel(**{**config, **changes}), seed)
    with torch.no_grad():
        for token in (model.x_pad_token, model.cap_pad_token):
            token.copy_(torch.randn_like(token))
    return model


def make_pipeline(seed: int, *, shift: float = 3.0, **changes: Any) -> ZImagePipeline:
    """A whole pipeline; ``changes``: of the parts, by name."""
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=make_vae(seed + 1, **changes.get("vae", {})),
        text_encoder=make_text(seed + 2, **changes.get("text", {})),
        tokenizer=chat_tokenizer(),
        transformer=make_transformer(seed + 3, **changes.get("transformer", {})),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Latents ``[channels, height, width]`` as tokens ``[tokens, channels * 4]``."""
    channels, height, width = latents.shape
    grid = latents.reshape(channels, height // 2, 2, width // 2, 2)
    return grid.permute(1, 3, 0, 2, 4).reshape(-1, channels * 4)


def tokens_of(pipeline: ZImagePipeline, prompt: str) -> np.ndarray:
    """The tokens of a prompt without padding."""
    text = pipeline.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tokenize=False, add_generation_prompt=True, enable_thinking=True,
    )  # fmt: skip
    return np.array(pipeline.tokenizer(text, truncation=True, max_length=512).input_ids, np.int32)


@torch.no_grad()
def results(
    pipeline: ZImagePipeline, seed: int, steps: int = 4, **case: Any
) -> dict[str, np.ndarray]:
    """Everything that diffusers computes on the way to a picture."""
    found = {}
    guided = case["guidance_scale"] > 0
    states, negative = pipeline.encode_prompt(
        case["prompt"],
        negative_prompt=case.get("negative_prompt"),
        do_classifier_free_guidance=guided,
    )
    found["tokens"], found["prompt"] = tokens_of(pipeline, case["prompt"]), states[0].numpy()
    if guided:
        found["negative_tokens"] = tokens_of(pipeline, case.get("negative_prompt", ""))
        found["negative_prompt"] = negative[0].numpy()
    channels, scale = pipeline.transformer.config.in_channels, pipeline.vae_scale_factor
    shape = (1, channels, case["height"] // scale, case["width"] // scale)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    noises, after = [], []
    hook = pipeline.transformer.register_forward_hook(
        lambda _m, _i, out: noises.append(-out[0][0][:, 0])
    )
    call = {"num_inference_steps": steps, "latents": start, **case}
    latents = pipeline(
        **call,
        output_type="latent",
        callback_on_step_end=lambda _p, _i, _t, kept: after.append(kept["latents"][0]) or {},
    ).images[0]
    sigmas = pipeline.scheduler.sigmas.numpy()
    pixels = pipeline(**call, output_type="np").images[0]
    hook.remove()
    arrays = {"start": start[0], "noise": noises[0], "middle": after[1], "latents": latents}
    found |= {name: packed(array).numpy() for name, array in arrays.items()}
    return {**found, "sigmas": sigmas, "pixels": np.rint(pixels * 255).astype(np.uint8)}


def rounded(pipeline: ZImagePipeline, kind: torch.dtype) -> ZImagePipeline:
    """Weights rounded to a type and widened to float32 again."""
    for name in ("text_encoder", "transformer", "vae"):
        for parameter in getattr(pipeline, name).parameters():
            parameter.data = parameter.data.to(kind).float()
    return pipeline


def thin(weight: torch.nn.Parameter) -> None:
    """Keep one in 16 weights of every row and column, four times as large."""
    rows, columns = (torch.arange(size) for size in weight.shape)
    weight.data *= 4.0 * ((rows[:, None] + columns) % 16 == 0)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    pipeline = make_pipeline(40, vae={"block_out_channels": (8, 8, 8)})
    thin(pipeline.transformer.t_embedder.mlp[0].weight)
    pipeline = rounded(pipeline, torch.float16)
    arrays = {}
    for index, (name, case) in enumerate(CASES.items()):
        found = results(pipeline, index, **case)
        arrays |= {f"{name}_{key}": array for key, array in found.items()}
        arrays[f"{name}_case"] = np.frombuffer(json.dumps(case).encode(), np.uint8)
    pipeline.to(torch.float16)
    save(pipeline, folder)
    np.savez_compressed(folder / "reference.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"zimage: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
