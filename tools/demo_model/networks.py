"""The networks of both demo models in torch, a step of their training, and their files.

Needs torch, safetensors and tokenizers. The parameters of a network are a dict with the
checkpoint's tensor names. ``config``: of a decoder, as in its ``config.json``.
"""
# mypy: disable-error-code="no-any-return"
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.deploy.demo_shapes import SIDE

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""First special tokens of both tokenizers."""
END_OF_TEXT, _, IM_END = range(3)

Parameters = dict[str, torch.Tensor]
Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each ``[..., length, head size]``."""
Shapes = dict[str, tuple[int, ...]]


def byte_level_bpe(texts: Iterable[str], size: int, specials: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE with ``size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# ------------------------------------------------------------------------------ parameters


def head_size(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head."""
    return config["hidden_size"] // config["num_attention_heads"]


def linear_shapes(name: str, out: int, into: int, *, bias: bool) -> Shapes:
    """Return the shapes of a linear layer."""
    weight: Shapes = {f"{name}.weight": (out, into)}
    return weight | ({f"{name}.bias": (out,)} if bias else {})


def decoder_shapes(config: Mapping[str, Any], *, bias: bool) -> Shapes:
    """Return the shapes of a decoder's layers. ``bias``: of q, k and v."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * head_size(config)
    found: Shapes = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.{norm}.weight"] = (hidden,)
        for part, rows in (("q", hidden), ("k", kv), ("v", kv)):
            found |= linear_shapes(f"{name}.self_attn.{part}_proj", rows, hidden, bias=bias)
        found |= linear_shapes(f"{name}.self_attn.o_proj", hidden, hidden, bias=False)
        found |= gated_mlp_shapes(f"{name}.mlp", hidden, wide, bias=False)
    return found


def gated_mlp_shapes(name: str, hidden: int, wide: int, *, bias: bool) -> Shapes:
    """Return the shapes of an MLP with gates."""
    return {
        **linear_shapes(f"{name}.gate_proj", wide, hidden, bias=bias),
        **linear_shapes(f"{name}.up_proj", wide, hidden, bias=bias),
        **linear_shapes(f"{name}.down_proj", hidden, wide, bias=bias),
    }


def initial_parameters(shapes: Shapes, depths: Mapping[str, int]) -> Parameters:
    """Return random parameters: normal with standard deviation ``fan_in ** -0.5``.

    The output projections of a stack of layers are smaller by ``sqrt(2 * depth)``. ``depths``: by
    the first part of the names.
    """
    params: Parameters = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            params[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        elif "embed_tokens" in name:
            params[name] = torch.randn(shape) * 0.05
        else:
            scale = shape[1] ** -0.5
            if name.endswith(("attn.proj.weight", "o_proj.weight", "down_proj.weight")):
                scale /= math.sqrt(2 * depths[name.partition(".")[0]])
            params[name] = torch.randn(shape) * scale
    return {name: p.requires_grad_() for name, p in params.items()}


# ---------------------------------------------------------------------------------- layers


def linear(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply a matrix, with its bias if it has one."""
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def rms_norm(p: Parameters, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis of ``x``."""
    return F.rms_norm(x, x.shape[-1:], p[f"{name}.weight"], eps)


def gated_mlp(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply an MLP with SiLU gates."""
    gate, up = linear(p, f"{name}.gate_proj", x), linear(p, f"{name}.up_proj", x)
    return linear(p, f"{name}.down_proj", F.silu(gate) * up)


def rope_of(halves: torch.Tensor) -> Rope:
    """Return cosines and sines for angles of half the channels."""
    both = torch.cat((halves, halves), dim=-1)
    return both.cos(), both.sin()


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Apply RoPE to ``x [..., length, head size]``."""
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def attention(p: Parameters, name: str, x: torch.Tensor, rope: Rope, size: int) -> torch.Tensor:
    """Compute one layer's causal grouped-query attention for ``x [rows, length, hidden]``.

    ``size``: of a head.
    """
    rows, length, _ = x.shape

    def heads(part: str) -> torch.Tensor:
        return linear(p, f"{name}.{part}", x).view(rows, length, -1, size).transpose(1, 2)

    q, k, v = rotate(heads("q_proj"), rope), rotate(heads("k_proj"), rope), heads("v_proj")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(p, f"{name}.o_proj", y.transpose(1, 2).reshape(rows, length, -1))


def decoder_states(
    p: Parameters, config: Mapping[str, Any], x: torch.Tensor, rope: Rope
) -> torch.Tensor:
    """Return the tied head's input: normalised hidden states ``[rows, length, hidden]``.

    ``x``: embeddings of the same shape.
    """
    eps = config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = rms_norm(p, f"{name}.input_layernorm", x, eps)
        x = x + attention(p, f"{name}.self_attn", normed, rope, head_size(config))
        normed = rms_norm(p, f"{name}.post_attention_layernorm", x, eps)
        x = x + gated_mlp(p, f"{name}.mlp", normed)
    return rms_norm(p, "model.norm", x, eps)


# ---------------------------------------------------------------------- the tower that sees


PATCH, MERGE, WINDOW = 14, 2, 56
PATCHES = SIDE // PATCH
TOKENS = (PATCHES // MERGE) ** 2
"""Tokens of a picture."""
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

VISION: dict[str, Any] = {
    "model_type": "qwen2_5_vl_vision",
    "depth": 4,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_heads": 4,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "spatial_merge_size": MERGE,
    "window_size": WINDOW,
    "fullatt_block_indexes": [1, 3],
    "out_hidden_size": 128,
    "hidden_act": "silu",
    "in_channels": 3,
    "tokens_per_second": 2,
}


def tower_shapes() -> Shapes:
    """Return the shapes of the tower.

    The checkpoint's patch embedding has two times more, because a patch covers two times.
    """
    wide, merged = VISION["hidden_size"], VISION["hidden_size"] * MERGE**2
    found: Shapes = {
        "visual.patch_embed.proj.weight": (wide, 3 * PATCH * PATCH),
        "visual.merger.ln_q.weight": (wide,),
        **linear_shapes("visual.merger.mlp.0", merged, merged, bias=True),
        **linear_shapes("visual.merger.mlp.2", VISION["out_hidden_size"], merged, bias=True),
    }
    for layer in range(VISION["depth"]):
        name = f"visual.blocks.{layer}"
        found |= {f"{name}.norm1.weight": (wide,), f"{name}.norm2.weight": (wide,)}
        found |= linear_shapes(f"{name}.attn.qkv", 3 * wide, wide, bias=True)
        found |= linear_shapes(f"{name}.attn.proj", wide, wide, bias=True)
        found |= gated_mlp_shapes(f"{name}.mlp", wide, VISION["intermediate_size"], bias=True)
    return found


def frequencies(size: int) -> torch.Tensor:
    """Return RoPE's frequencies of ``size`` channels, ``[size // 2]``."""
    return 1 / 10000.0 ** (torch.arange(0, size, 2) / size)


def patch_order() -> torch.Tensor:
    """Return the patches' indices in the order of windows, tokens, patches, ``[PATCHES ** 2]``."""
    side = WINDOW // PATCH // MERGE  # tokens of a window's side
    windows = PATCHES // MERGE // side
    at = torch.arange(PATCHES**2).view(windows, side, MERGE, windows, side, MERGE)
    return at.permute(0, 3, 1, 4, 2, 5).reshape(-1)


ORDER = patch_order()
UNORDER = torch.argsort(ORDER[:: MERGE**2] // PATCHES // MERGE * (PATCHES // MERGE)
                        + ORDER[:: MERGE**2] % PATCHES // MERGE)  # fmt: skip
"""The tokens back in rows."""


def patches_of(pixels: torch.Tensor) -> torch.Tensor:
    """Return normalised patches in :data:`ORDER`, ``[pictures, PATCHES ** 2, 3 * PATCH ** 2]``."""
    scaled = pixels.float() / 255
    scaled = (scaled - torch.tensor(MEAN)) / torch.tensor(STD)
    cut = scaled.view(-1, PATCHES, PATCH, PATCHES, PATCH, 3).permute(0, 1, 3, 5, 2, 4)
    return cut.reshape(len(pixels), PATCHES**2, -1)[:, ORDER]


def features_of(p: Parameters, pixels: torch.Tensor) -> torch.Tensor:
    """Return the features of each picture's tokens, ``[pictures, TOKENS, hidden]``."""
    wide, heads = VISION["hidden_size"], VISION["num_heads"]
    size = wide // heads
    half = frequencies(size // 2)
    at = torch.stack((ORDER // PATCHES, ORDER % PATCHES), dim=1)
    rope = rope_of((at[:, :, None] * half).flatten(1))
    x = F.linear(patches_of(pixels), p["visual.patch_embed.proj.weight"])
    pictures, rows, _ = x.shape
    for layer in range(VISION["depth"]):
        name = f"visual.blocks.{layer}"
        whole = layer in VISION["fullatt_block_indexes"]
        group = rows if whole else (WINDOW // PATCH) ** 2
        qkv = linear(p, f"{name}.attn.qkv", rms_norm(p, f"{name}.norm1", x, 1e-6))
        q, k, v = qkv.view(pictures, rows, 3, heads, size).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rope), rotate(k, rope)
        parts = [
            t.reshape(pictures, heads, rows // group, group, size).transpose(1, 2).flatten(0, 1)
            for t in (q, k, v)
        ]
        y = F.scaled_dot_product_attention(*parts)
        y = y.view(pictures, rows // group, heads, group, size).permute(0, 1, 3, 2, 4)
        x = x + linear(p, f"{name}.attn.proj", y.reshape(pictures, rows, wide))
        x = x + gated_mlp(p, f"{name}.mlp", rms_norm(p, f"{name}.norm2", x, 1e-6))
    x = rms_norm(p, "visual.merger.ln_q", x, 1e-6).reshape(pictures, TOKENS, -1)
    x = linear(p, "visual.merger.mlp.2", F.gelu(linear(p, "visual.merger.mlp.0", x)))
    return x[:, UNORDER]


# -------------------------------------------------------------------------------- training


def answer_loss(
    p: Parameters, states: torch.Tensor, ids: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    """Return the mean cross-entropy of the answer tokens.

    ``states``: see :func:`decoder_states`. ``ids``, ``answers``: ``[rows, length + 1]``, tokens and
    whether each is of an answer.
    """
    wanted = answers[:, 1:]
    logits = F.linear(states[wanted], p["model.embed_tokens.weight"])
    return F.cross_entropy(logits, ids[:, 1:][wanted])


def optimizers(p: Parameters, stacks: Sequence[str], rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the rest.

    ``stacks``: parts of the layers' names. ``rate``: learning rate of AdamW.
    """
    names = [k for k, v in p.items() if v.ndim == 2 and any(part in k for part in stacks)]
    return [
        torch.optim.Muon([p[k] for k in names], lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(
            [v for k, v in p.items() if k not in names],
            lr=rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]


def take_step(opts: list[torch.optim.Optimizer], loss: torch.Tensor, factor: float) -> None:
    """Update the parameters once. ``factor`` multiplies the learning rates."""
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)


# ----------------------------------------------------------------------------------- files


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_texts(
    out: Path, tokenizer: Tokenizer, config: Mapping[str, Any], sampling: Mapping[str, Any]
) -> None:
    """Write the tokenizer and the config files. The folder's chat template is written by hand.

    ``sampling``: further fields of ``generation_config.json``.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "config.json", config)
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": END_OF_TEXT,
            "eos_token_id": [IM_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
            **sampling,
        },
    )
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[END_OF_TEXT],
            "eos_token": SPECIALS[IM_END],
            "pad_token": SPECIALS[END_OF_TEXT],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.get("text_config", config)["max_position_embeddings"],
        },
    )


def save_weights(out: Path, params: Parameters) -> None:
    """Write the weights as bfloat16 safetensors; the file is replaced atomically."""
    tensors = {name: v.detach().to(torch.bfloat16).contiguous() for name, v in params.items()}
    save_file(tensors, str(out / "model.safetensors.new"), metadata={"format": "pt"})
    (out / "model.safetensors.new").chmod(0o644)
    (out / "model.safetensors.new").replace(out / "model.safetensors")
