"""Write the tiny Flux models under tests/data/pictures with diffusers' results.

Run with a Python that has torch, transformers and diffusers::

    python tests/oracle/make_pictures.py [FOLDER]

A folder is a whole pipeline in the diffusers layout beside ``reference.npz``. For each of the
cases in ``CASES``: tokens (``NAME_clip``, ``NAME_t5`` and the negative ones), encoded texts
(``NAME_pooled``, ``NAME_prompt``), the first noise (``NAME_noise``), the latents before and after
the steps (``NAME_start``, ``NAME_latents``), sigmas and pixels (``NAME_pixels``).
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
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).resolve().parents[1] / "data" / "pictures"
T5_LENGTH = 24
START, END = 98, 99
CASES: dict[str, dict[str, Any]] = {
    "plain": {"height": 32, "width": 48, "guidance_scale": 3.5},
    "guided": {"height": 32, "width": 32, "guidance_scale": 2.0, "true_cfg_scale": 3.0},
}
WORDS = ("a", "cat", "on", "the", "mat", "sun", "red", "blue", "house", "tree", "of", "two", "sea")


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Weights that make every part of a model matter."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif "embedding" in name or "shared" in name or "relative" in name:
                parameter.copy_(torch.randn_like(parameter))
            else:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn_like(parameter) * fan_in**-0.5)
    return model.eval()


def make_clip(seed: int, **changes: Any) -> torch.nn.Module:
    """A CLIP text model."""
    config = {
        "vocab_size": 100, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 2, "bos_token_id": START, "eos_token_id": END, "pad_token_id": END,
    }  # fmt: skip
    config = transformers.CLIPTextConfig(**{**config, **changes})
    return randomise(transformers.CLIPTextModel(config), seed)


def make_t5(seed: int, **changes: Any) -> torch.nn.Module:
    """A T5 encoder."""
    config = {
        "vocab_size": 100, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 3,
        "feed_forward_proj": "gated-gelu",
    }  # fmt: skip
    return randomise(
        transformers.T5EncoderModel(transformers.T5Config(**{**config, **changes})), seed
    )


def make_flux(seed: int, **changes: Any) -> torch.nn.Module:
    """A Flux transformer."""
    config = {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 24,
        "axes_dims_rope": (4, 6, 6), "guidance_embeds": True,
    }  # fmt: skip
    return randomise(FluxTransformer2DModel(**{**config, **changes}), seed)


def make_vae(seed: int, **changes: Any) -> torch.nn.Module:
    """A VAE of three levels: one latent stands for 4x4 pixels."""
    config = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (8, 8, 16), "layers_per_block": 1, "latent_channels": 4,
        "norm_num_groups": 4, "scaling_factor": 0.3611, "shift_factor": 0.6159,
        "use_quant_conv": False, "use_post_quant_conv": False,
    }  # fmt: skip
    return randomise(AutoencoderKL(**{**config, **changes}), seed)


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """Byte-level BPE with the ends of words marked, as CLIP has it, of 100 tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    vocab = {c: i for i, c in enumerate([*letters, *(f"{c}</w>" for c in letters)])}
    merges = [("t", "h"), ("th", "e</w>"), ("c", "a"), ("ca", "t</w>"), ("o", "n</w>")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    while len(vocab) < START:
        vocab[f"<unused{len(vocab)}>"] = len(vocab)
    vocab |= {"<|startoftext|>": START, "<|endoftext|>": END}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges)


def t5_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A Unigram tokenizer with T5's special tokens."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces += [(f"▁{word}", -2.0) for word in WORDS] + [("▁", -5.0)]
    pieces += [(c, -8.0) for c in "abcdefghijklmnopqrstuvwxyz0123456789.,"]
    core = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    core.decoder = tokenizers.decoders.Metaspace()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **names)


def make_pipeline(seed: int, *, dynamic: bool = True, **changes: Any) -> FluxPipeline:
    """A whole pipeline; ``changes``: of the parts, by name."""
    shifts = {"base_image_seq_len": 4, "max_image_seq_len": 256} if dynamic else {}
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0 if dynamic else 1.0, use_dynamic_shifting=dynamic, **shifts
    )
    return FluxPipeline(
        scheduler=scheduler,
        vae=make_vae(seed + 1, **changes.get("vae", {})),
        text_encoder=make_clip(seed + 2, **changes.get("clip", {})),
        tokenizer=clip_tokenizer(),
        text_encoder_2=make_t5(seed + 3, **changes.get("t5", {})),
        tokenizer_2=t5_tokenizer(),
        transformer=make_flux(seed + 4, **changes.get("flux", {})),
    )


def random_tokens(seed: int) -> dict[str, np.ndarray]:
    """Tokens of a prompt and a negative prompt for both encoders."""
    rng = np.random.default_rng(seed)
    found = {}
    for prefix, length in (("", 9), ("negative_", 5)):
        clip = np.full(77, END, np.int32)
        clip[: length + 1] = [START, *rng.integers(0, START, length)]
        found[f"{prefix}clip"] = clip
        t5 = np.zeros(T5_LENGTH, np.int32)
        t5[: 2 * length] = [*rng.integers(3, 100, 2 * length - 1), 1]
        found[f"{prefix}t5"] = t5
    return found


@torch.no_grad()
def results(
    pipeline: FluxPipeline, seed: int, steps: int = 4, **case: Any
) -> dict[str, np.ndarray]:
    """Everything that diffusers computes on the way to a picture."""
    found = random_tokens(seed)
    tensors = {name: torch.from_numpy(ids.astype(np.int64))[None] for name, ids in found.items()}
    embeds = {}
    for prefix in ("", "negative_") if "true_cfg_scale" in case else ("",):
        pooled = pipeline.text_encoder(tensors[f"{prefix}clip"]).pooler_output
        states = pipeline.text_encoder_2(tensors[f"{prefix}t5"])[0]
        embeds |= {f"{prefix}pooled_prompt_embeds": pooled, f"{prefix}prompt_embeds": states}
    unit = 2 * pipeline.vae_scale_factor
    tokens = (case["height"] // unit) * (case["width"] // unit)
    channels = pipeline.transformer.config.in_channels
    start = torch.randn(1, tokens, channels, generator=torch.Generator().manual_seed(seed))
    noises, after = [], []
    hook = pipeline.transformer.register_forward_hook(lambda _m, _i, out: noises.append(out[0][0]))
    call = {"num_inference_steps": steps, "latents": start, **embeds, **case}
    latents = pipeline(
        **call,
        output_type="latent",
        callback_on_step_end=lambda _p, _i, _t, kept: after.append(kept["latents"][0]) or {},
    ).images[0]
    sigmas = pipeline.scheduler.sigmas.numpy()
    pixels = pipeline(**call, output_type="np").images[0]
    hook.remove()
    arrays = {
        "pooled": embeds["pooled_prompt_embeds"][0],
        "prompt": embeds["prompt_embeds"][0],
        "start": start[0],
        "noise": noises[0],
        "latents": latents,
        "middle": after[1],
    }
    if "true_cfg_scale" in case:
        arrays["negative_pooled"] = embeds["negative_pooled_prompt_embeds"][0]
        arrays["negative_prompt"] = embeds["negative_prompt_embeds"][0]
    found |= {name: array.numpy() for name, array in arrays.items()}
    return {**found, "sigmas": sigmas, "pixels": np.rint(pixels * 255).astype(np.uint8)}


def save(pipeline: FluxPipeline, folder: Path) -> None:
    """Write a pipeline without the VAE's encoder, which draws no pictures."""
    pipeline.save_pretrained(folder)
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    kept = {n: a for n, a in load_file(path).items() if not n.startswith("encoder.")}
    save_file(kept, path)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    pipeline = make_pipeline(20)
    pipeline.set_progress_bar_config(disable=True)
    save(pipeline, folder / "flux")
    arrays = {}
    for index, (name, case) in enumerate(CASES.items()):
        found = results(pipeline, index, **case)
        arrays |= {f"{name}_{key}": array for key, array in found.items()}
        arrays[f"{name}_case"] = np.frombuffer(json.dumps(case).encode(), np.uint8)
    prompt = "The cat, on 2 mats: a red house... & the sea"
    arrays["text_clip"] = np.array(pipeline.tokenizer(prompt).input_ids, np.int32)
    arrays["text_t5"] = np.array(pipeline.tokenizer_2(prompt).input_ids, np.int32)
    arrays["text"] = np.frombuffer(prompt.encode(), np.uint8)
    np.savez_compressed(folder / "flux" / "reference.npz", **arrays)
    size = sum(f.stat().st_size for f in (folder / "flux").rglob("*") if f.is_file())
    print(f"flux: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
