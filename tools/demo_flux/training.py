"""Train the demo Flux model: ``python -m baton.tools.demo_flux.training --out DIR``.

This script needs torch, transformers, diffusers and tokenizers; no other module imports it. It
trains a VAE on generated scenes, then by flow matching a Flux transformer together with both text
encoders. It writes a folder in the diffusers layout, in bfloat16.

Prompts of every length work alike, although Flux attends to padding. The attention of T5 is cut to
a token and the seven before it, so padding never changes the text, and padding far from the text
has equal states. Such tokens have no position in Flux, so training computes one of them and adds
the logarithm of their number to its attention scores.
"""
# mypy: disable-error-code="no-any-return, untyped-decorator"
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
import transformers
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from safetensors.torch import load_file, save_file

from .scenes import SIDE, Scene, all_scenes, is_held_out, render, words

VAE_CONFIG: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (8, 16, 32),
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
    "sample_size": SIDE,
}
FLUX_CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (4, 10, 10),
    "guidance_embeds": False,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,"
PAD, END, UNKNOWN = range(3)
WINDOW = 8
"""Tokens that a token of T5 attends to: itself and those before it."""
LONGEST = 9
"""Tokens of the longest prompt for T5, with the end token."""
TEXT_LENGTH = LONGEST + WINDOW
"""Tokens that training computes; the last stands for all padding after it."""
PROMPT_LENGTHS = (TEXT_LENGTH, 512)
"""Range of prompt lengths, with padding, for which the model is trained."""
NO_PROMPT = 0.05
"""Share of pictures that are trained without a prompt, for true CFG."""


# ------------------------------------------------------------------------------- tokenizers


def merges_of(vocabulary: list[str]) -> list[tuple[str, str]]:
    """Return the merges of byte-level BPE that make each word one token."""
    merges: list[tuple[str, str]] = []
    for word in vocabulary:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            pairs = [*pairwise(parts)]
            ranks = [merges.index(pair) if pair in merges else len(merges) for pair in pairs]
            at = ranks.index(min(ranks))
            if ranks[at] == len(merges):
                merges.append(pairs[at])
            parts[at : at + 2] = ["".join(pairs[at])]
    return merges


def clip_tokenizer() -> transformers.CLIPTokenizer:
    """Return a tokenizer as CLIP has it: every word of a prompt is one token."""
    names = [*LETTERS, *(f"{c}</w>" for c in LETTERS)]
    merges = merges_of([word for word in words() if len(word) > 1])
    names += [a + b for a, b in merges] + ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {name: i for i, name in enumerate(names)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=merges)


def t5_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a Unigram tokenizer of the words of the prompts; other words are unknown."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces += [(f"▁{word}", -2.0) for word in words()] + [("▁", -5.0)]
    core = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=UNKNOWN))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    core.decoder = tokenizers.decoders.Metaspace()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", END)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=PROMPT_LENGTHS[1], **names
    )


# ------------------------------------------------------------------------------- models


def make_clip(tokenizer: transformers.CLIPTokenizer) -> transformers.CLIPTextModel:
    """Return a CLIP text encoder with random weights."""
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
    )


def make_t5(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.T5EncoderModel:
    """Return a T5 encoder whose attention sees a token and the seven before it."""
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        relative_attention_num_buckets=4 * WINDOW,
        feed_forward_proj="gated-gelu",
    )
    model = transformers.T5EncoderModel(config)
    close_window(model)
    return model


def close_window(t5: transformers.T5EncoderModel) -> None:
    """Forbid attention to later tokens and to those before the window."""
    attention = t5.encoder.block[0].layer[0].SelfAttention
    with torch.no_grad():  # the buckets of the distances 0 to 7 before the token come first
        attention.relative_attention_bias.weight[WINDOW:] = -60.0


def make_flux() -> FluxTransformer2DModel:
    """Return a transformer whose blocks change nothing at first."""
    model = FluxTransformer2DModel(**FLUX_CONFIG)
    for name, parameter in model.named_parameters():
        if ("norm" in name and ".linear." in name) or name.startswith("proj_out"):
            torch.nn.init.zeros_(parameter)
    return model


# ------------------------------------------------------------------------------- VAE


def to_tensor(pictures: list[np.ndarray]) -> torch.Tensor:
    """Return pictures as floats from -1 to 1, ``[n, 3, SIDE, SIDE]``."""
    stacked = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float()
    return stacked / 127.5 - 1


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a short warm-up, then a cosine to zero."""
    return min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train_vae(scenes: list[Scene], steps: int, rng: np.random.Generator) -> AutoencoderKL:
    """Return a VAE; its latents have a mean of 0 and a deviation of 1 after scaling."""
    vae = AutoencoderKL(**VAE_CONFIG)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    mean = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * rate(step, steps)
        chosen = rng.integers(0, len(scenes), 16)
        pictures = to_tensor([render(scenes[i], rng) for i in chosen])
        latents = vae.encode(pictures).latent_dist.mean
        # Noise makes the decoder forgive small errors of the transformer.
        noisy = latents + 0.15 * torch.randn_like(latents)
        drawn = vae.decode(noisy).sample
        off = drawn - pictures
        loss = off.abs().mean() + off.square().mean() + 0.01 * (latents.square().mean() - 1) ** 2
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 49:
            report(f"vae {step + 1}/{steps}  loss {mean:.4f}")
    return vae.eval()


@torch.no_grad()
def encode(
    vae: AutoencoderKL, scenes: list[Scene], count: int, rng: np.random.Generator
) -> tuple[np.ndarray, torch.Tensor]:
    """Return scenes (their indices) and their latents, packed and scaled.

    Sets the scaling of the VAE.
    """
    single = sum(scene.second is None for scene in scenes)
    chosen = rng.integers(0, len(scenes), count)
    chosen[: count // 6] = rng.integers(0, single, count // 6)
    parts = []
    for at in range(0, count, 64):
        pictures = to_tensor([render(scenes[i], rng) for i in chosen[at : at + 64]])
        parts.append(vae.encode(pictures).latent_dist.mean)
    latents = torch.cat(parts)
    shift, scale = round(float(latents.mean()), 4), round(float(1 / latents.std()), 4)
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    latents = (latents - shift) * scale
    side = latents.shape[2]
    return chosen, FluxPipeline._pack_latents(latents, count, 4, side, side)


# ------------------------------------------------------------------------------- flow matching


def prompt_tokens(pipeline: FluxPipeline, scenes: list[Scene]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of all prompts for CLIP and for T5; the last prompt is empty."""
    prompts = [scene.prompt for scene in scenes] + [""]
    clip = pipeline.tokenizer(
        prompts, padding="max_length", max_length=LONGEST + 2, return_tensors="pt"
    )
    t5 = pipeline.tokenizer_2(
        prompts, padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt"
    )
    return clip.input_ids, t5.input_ids


def padding_scores(count: int, image: int) -> torch.Tensor:
    """Return the terms added to attention scores ``[count, 1, 1, keys]``."""
    low, high = (math.log(length) for length in PROMPT_LENGTHS)
    lengths = torch.exp(low + (high - low) * torch.rand(count))
    scores = torch.zeros(count, 1, 1, TEXT_LENGTH + image)
    scores[:, 0, 0, TEXT_LENGTH - 1] = torch.log(lengths - TEXT_LENGTH + 1)
    return scores


def flow_loss(
    pipeline: FluxPipeline, clip: torch.Tensor, t5: torch.Tensor, latents: torch.Tensor
) -> torch.Tensor:
    """Return the mean square error of the noise minus the latents, at random noise levels."""
    count, image = latents.shape[:2]
    noise, sigma = torch.randn_like(latents), torch.sigmoid(torch.randn(count) + 0.3)
    mixed = (1 - sigma)[:, None, None] * latents + sigma[:, None, None] * noise
    side = math.isqrt(image)
    found = pipeline.transformer(
        hidden_states=mixed,
        encoder_hidden_states=pipeline.text_encoder_2(t5)[0],
        pooled_projections=pipeline.text_encoder(clip).pooler_output,
        timestep=sigma,
        img_ids=FluxPipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32),
        txt_ids=torch.zeros(TEXT_LENGTH, 3),
        joint_attention_kwargs={"attention_mask": padding_scores(count, image)},
        return_dict=False,
    )[0]
    return F.mse_loss(found, noise - latents)


def optimizers(pipeline: FluxPipeline) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for the rest."""
    blocks: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for model in (pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2):
        for name, parameter in model.named_parameters():
            inner = any(part in name for part in ("blocks.", ".layers.", ".block."))
            is_matrix = parameter.ndim == 2 and "relative" not in name and "norm" not in name
            (blocks if inner and is_matrix else rest).append(parameter)
    return [
        torch.optim.Muon(blocks, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def batches(
    chosen: np.ndarray, latents: torch.Tensor, size: int, empty: int, rng: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield prompts (their indices) and latents forever; a share of the prompts is empty."""
    while True:
        order = rng.permutation(len(chosen))
        for at in range(0, len(order) - size + 1, size):
            rows = order[at : at + size]
            prompts = np.where(rng.random(size) < NO_PROMPT, empty, chosen[rows])
            yield torch.from_numpy(prompts), latents[torch.from_numpy(rows)]


def train_flux(
    pipeline: FluxPipeline,
    scenes: list[Scene],
    data: tuple[np.ndarray, torch.Tensor],
    steps: int,
    rng: np.random.Generator,
) -> None:
    """Train transformer and text encoders; at the end they have the mean of the last weights."""
    models = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]
    parameters = [p for model in models for p in model.parameters()]
    averages = [p.detach().clone() for p in parameters]
    opts, mean = optimizers(pipeline), 0.0
    base = [group["lr"] for opt in opts for group in opt.param_groups]
    clip, t5 = prompt_tokens(pipeline, scenes)
    source = batches(*data, 64, len(scenes), rng)
    for step in range(steps):
        groups = [group for opt in opts for group in opt.param_groups]
        for group, lr in zip(groups, base, strict=True):
            group["lr"] = lr * rate(step, steps)
        prompts, latents = next(source)
        loss = flow_loss(pipeline, clip[prompts], t5[prompts], latents)
        for opt in opts:
            opt.zero_grad(set_to_none=True)
        loss.backward()
        for opt in opts:
            opt.step()
        close_window(pipeline.text_encoder_2)
        with torch.no_grad():
            for average, parameter in zip(averages, parameters, strict=True):
                average.lerp_(parameter, 0.01)
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 49:
            report(f"flux {step + 1}/{steps}  loss {mean:.4f}")
    with torch.no_grad():
        for average, parameter in zip(averages, parameters, strict=True):
            parameter.copy_(average)
    close_window(pipeline.text_encoder_2)


# ------------------------------------------------------------------------------- saving


def save(pipeline: FluxPipeline, folder: Path) -> None:
    """Write a pipeline in bfloat16, without the VAE's encoder, which draws no pictures."""
    pipeline.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    kept = {n: a for n, a in load_file(path).items() if not n.startswith("encoder.")}
    save_file(kept, path, metadata={"format": "pt"})


def report(line: str) -> None:
    """Print a line with the processor time since the start."""
    print(f"{time.process_time() / 60:6.2f} min  {line}", flush=True)  # noqa: T201


def training_scenes() -> list[Scene]:
    """Return the scenes that are not held out."""
    return [scene for index, scene in enumerate(all_scenes()) if not is_held_out(index)]


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="train the demo Flux model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vae-steps", type=int, default=700)
    parser.add_argument("--steps", type=int, default=1800, help="of the transformer")
    parser.add_argument("--pictures", type=int, default=20000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    scenes = training_scenes()
    vae = train_vae(scenes, args.vae_steps, rng)
    data = encode(vae, scenes, args.pictures, rng)
    report(f"{args.pictures} pictures encoded")
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=make_clip(clip),
        tokenizer=clip,
        text_encoder_2=make_t5(t5),
        tokenizer_2=t5,
        transformer=make_flux(),
    )
    train_flux(pipeline, scenes, data, args.steps, rng)
    save(pipeline, args.out)


if __name__ == "__main__":
    main()
