"""Train the demo model that sees: ``python -m baton.tools.demo_model.sight_training --out DIR``.

This script needs torch, safetensors and tokenizers; no other module imports it. It trains a
byte-level BPE tokenizer on the questions and answers of :mod:`.sights`. Then it trains a Qwen2.5-VL
of 1.1 million parameters in two phases. First the tower alone learns to see: linear heads, which
are not part of the model, name what each token covers. Then tower and decoder learn from
conversations about generated pictures, where answer tokens contribute to the loss, and the heads a
little. It writes a Hugging Face folder in bfloat16. The parameters are a dict with the checkpoint's
tensor names. The tower computes all pictures of a batch together, which is possible because they
have one size.
"""
# mypy: disable-error-code="no-any-return"
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ...deploy.demo_shapes import SHAPES, SIDE
from .corpus import documentation
from .sights import AGAIN, COLOUR_NAMES, OPPOSITE, PLACES, SeenWorld, Sight, description, labels
from .training import Parameters, Rope, rotate, write_json

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_OF_TEXT, _, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(7)
PATCH, MERGE, WINDOW = 14, 2, 56
PATCHES = SIDE // PATCH
TOKENS = (PATCHES // MERGE) ** 2
"""Tokens of a picture."""
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

TEXT: dict[str, Any] = {
    "model_type": "qwen2_5_vl_text",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
    },
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
    "pad_token_id": END_OF_TEXT,
}
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
    "out_hidden_size": TEXT["hidden_size"],
    "hidden_act": "silu",
    "in_channels": 3,
    "tokens_per_second": 2,
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config": TEXT,
    "vision_config": VISION,
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
    "pad_token_id": END_OF_TEXT,
    "dtype": "bfloat16",
}
HEAD = TEXT["hidden_size"] // TEXT["num_attention_heads"]
TURNS = 3
"""Turns of most conversations about a picture."""
LONG = 0.04
"""Share of batches with :data:`LONG_LENGTH` tokens, of descriptions that never end."""
LONG_LENGTH = 640
HEADS = (len(COLOUR_NAMES) + 1, len(SHAPES), len(PLACES), len(OPPOSITE) + 1, 2)
"""Classes of each head; the first one's last class is an empty token."""
UNKNOWN = -100
"""A target that does not count."""
HEAD_WEIGHT = 0.2
"""Of the heads' loss in the second phase."""
Angles = Rope


# ------------------------------------------------------------------------------- tokenizer


def train_tokenizer(world: SeenWorld, docs: list[str]) -> Tokenizer:
    """Train a byte-level BPE in which every word of the questions and answers is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    turns = ["\n".join(world.turn(world.sight())) for _ in range(6000)]
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT["vocab_size"],
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*turns, AGAIN, *docs[::60]], trainer)
    return tokenizer


# --------------------------------------------------------------------------------- batches


@dataclass(slots=True)
class Row:
    """Tokens of a conversation, and which of them are answers."""

    ids: list[int]
    answers: list[bool]


@dataclass(slots=True, frozen=True)
class Batch:
    """Conversations of one length, padded on the right.

    ``ids``: ``[rows, n + 1]``. ``answers``: of the same shape. ``positions``: ``[3, rows, n]``,
    time, row and column. ``pixels``: uint8 ``[pictures, SIDE, SIDE, 3]``, in the order of the rows.
    ``targets``: ``[pictures, TOKENS, heads]``.
    """

    ids: torch.Tensor
    answers: torch.Tensor
    positions: torch.Tensor
    pixels: torch.Tensor
    targets: torch.Tensor


class Batches:
    """An endless source of batches. ``rows``: conversations of a batch."""

    def __init__(self, world: SeenWorld, tokenizer: Tokenizer, rows: int) -> None:
        self._world, self._rng, self._rows = world, world.rng, rows
        self._encode = lru_cache(maxsize=20000)(lambda text: tuple(tokenizer.encode(text).ids))

    def next(self) -> Batch:
        """Return the next batch."""
        if self._rng.random() < LONG:
            return self._batch([self._conversation(LONG_LENGTH) for _ in range(self._rows // 8)])
        return self._batch([self._conversation(0) for _ in range(self._rows)])

    def _conversation(self, endless: int) -> tuple[Row, Sight | None]:
        """Return a conversation, if ``endless`` with one answer of about so many tokens."""
        world, row = self._world, Row([], [])
        system = world.system_message()
        if system is not None:
            self._append(row, f"<|im_start|>system\n{system}<|im_end|>\n")
        sight = world.sight()
        if endless:
            said = description(sight)
            self._ask(row, AGAIN, sight)
            self._append(row, said, answer=True)
            while len(row.ids) < endless:
                self._append(row, " " + said, answer=True)
            return row, sight
        if self._rng.random() < 0.06:
            question, answer = world.plain_turn(sight)
            self._ask(row, question, None, answer)
            return row, None
        shown: Sight | None = sight
        for _ in range(TURNS):
            question, answer = world.turn(sight)
            self._ask(row, question, shown, answer)
            shown = None
        return row, sight

    def _ask(self, row: Row, question: str, sight: Sight | None, answer: str = "") -> None:
        """Append a question, with the picture before or after it, and the answer if any."""
        self._append(row, "<|im_start|>user\n")
        picture = [VISION_START, *[IMAGE_PAD] * TOKENS, VISION_END] if sight is not None else []
        before = self._rng.random() < 0.75
        if before:
            self._extend(row, picture)
        self._append(row, question)
        if not before:
            self._extend(row, picture)
        self._append(row, "<|im_end|>\n<|im_start|>assistant\n")
        if answer:
            self._append(row, f"{answer}<|im_end|>", answer=True)
            self._append(row, "\n")

    def _append(self, row: Row, text: str, *, answer: bool = False) -> None:
        self._extend(row, self._encode(text), answer=answer)

    @staticmethod
    def _extend(row: Row, ids: Any, *, answer: bool = False) -> None:
        row.ids.extend(ids)
        row.answers.extend([answer] * len(ids))

    @staticmethod
    def _batch(made: list[tuple[Row, Sight | None]]) -> Batch:
        length = max(len(row.ids) for row, _ in made)
        ids = np.full((len(made), length), END_OF_TEXT, np.int64)
        answers = np.zeros((len(made), length), bool)
        for at, (row, _) in enumerate(made):
            ids[at, : len(row.ids)] = row.ids
            answers[at, : len(row.ids)] = row.answers
        positions = np.stack([rope_positions(row[:-1]) for row in ids], axis=1)
        pixels, targets = pictures([sight for _, sight in made if sight is not None])
        return Batch(
            ids=torch.from_numpy(ids),
            answers=torch.from_numpy(answers),
            positions=torch.from_numpy(positions),
            pixels=pixels,
            targets=targets,
        )


def pictures(shown: Sequence[Sight]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels and targets, as in :class:`Batch`."""
    empty = (len(COLOUR_NAMES), *[UNKNOWN] * (len(HEADS) - 1))
    targets = [
        [
            [UNKNOWN] * len(HEADS) if cell is None else cell or empty
            for line in rows
            for cell in line
        ]
        for rows in (labels(sight, PATCHES // MERGE) for sight in shown)
    ]
    pixels = np.stack([sight.pixels() for sight in shown])
    return torch.from_numpy(pixels), torch.tensor(targets)


def rope_positions(ids: np.ndarray) -> np.ndarray:
    """Return the position of each token, int64 ``[3, n]``: time, row and column.

    A picture's tokens have one time; the text goes on after its largest row or column.
    """
    positions = np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()
    (holders,) = np.nonzero(ids == IMAGE_PAD)
    if len(holders):
        start, side = holders[0], PATCHES // MERGE
        positions[:, start + TOKENS :] += side - TOKENS
        positions[:, start : start + TOKENS] = start
        positions[1, start : start + TOKENS] += np.repeat(np.arange(side), side)
        positions[2, start : start + TOKENS] += np.tile(np.arange(side), side)
    return positions


# ----------------------------------------------------------------------------------- model


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every trained tensor.

    The checkpoint's patch embedding has two times more, because a patch covers two times.
    """
    wide, inner = VISION["hidden_size"], VISION["intermediate_size"]
    hidden, ffn = TEXT["hidden_size"], TEXT["intermediate_size"]
    kv, merged = TEXT["num_key_value_heads"] * HEAD, wide * MERGE**2
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (TEXT["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "visual.patch_embed.proj.weight": (wide, 3 * PATCH * PATCH),
        "visual.merger.ln_q.weight": (wide,),
    }

    def linear(name: str, out: int, into: int, *, bias: bool = True) -> None:
        found[f"{name}.weight"] = (out, into)
        if bias:
            found[f"{name}.bias"] = (out,)

    linear("visual.merger.mlp.0", merged, merged)
    linear("visual.merger.mlp.2", hidden, merged)
    for layer in range(VISION["depth"]):
        name = f"visual.blocks.{layer}"
        found |= {f"{name}.norm1.weight": (wide,), f"{name}.norm2.weight": (wide,)}
        linear(f"{name}.attn.qkv", 3 * wide, wide)
        linear(f"{name}.attn.proj", wide, wide)
        linear(f"{name}.mlp.gate_proj", inner, wide)
        linear(f"{name}.mlp.up_proj", inner, wide)
        linear(f"{name}.mlp.down_proj", wide, inner)
    for layer in range(TEXT["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.{norm}.weight"] = (hidden,)
        linear(f"{name}.self_attn.q_proj", hidden, hidden)
        linear(f"{name}.self_attn.k_proj", kv, hidden)
        linear(f"{name}.self_attn.v_proj", kv, hidden)
        linear(f"{name}.self_attn.o_proj", hidden, hidden, bias=False)
        linear(f"{name}.mlp.gate_proj", ffn, hidden, bias=False)
        linear(f"{name}.mlp.up_proj", ffn, hidden, bias=False)
        linear(f"{name}.mlp.down_proj", hidden, ffn, bias=False)
    return found


def initial_parameters() -> Parameters:
    """Return random parameters: normal with standard deviation ``fan_in ** -0.5``.

    The output projections of the layers are smaller, as in the text model.
    """
    params: Parameters = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            params[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        elif "embed_tokens" in name:
            params[name] = torch.randn(shape) * 0.05
        else:
            scale = shape[1] ** -0.5
            if name.endswith(("attn.proj.weight", "o_proj.weight", "down_proj.weight")):
                depth = VISION["depth"] if "visual" in name else TEXT["num_hidden_layers"]
                scale /= math.sqrt(2 * depth)
            params[name] = torch.randn(shape) * scale
    return {name: p.requires_grad_() for name, p in params.items()}


def frequencies(size: int) -> torch.Tensor:
    """Return RoPE's frequencies of ``size`` channels, ``[size // 2]``."""
    return 1 / 10000.0 ** (torch.arange(0, size, 2) / size)


def angles_of(halves: torch.Tensor) -> Angles:
    """Return cosines and sines for angles of half the channels."""
    both = torch.cat((halves, halves), dim=-1)
    return both.cos(), both.sin()


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


def rms_norm(p: Parameters, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis of ``x``."""
    return F.rms_norm(x, x.shape[-1:], p[f"{name}.weight"], eps)


def linear(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply a matrix, with its bias if it has one."""
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def gated_mlp(p: Parameters, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply an MLP with SiLU gates."""
    gate, up = linear(p, f"{name}.gate_proj", x), linear(p, f"{name}.up_proj", x)
    return linear(p, f"{name}.down_proj", F.silu(gate) * up)


def features_of(p: Parameters, pixels: torch.Tensor) -> torch.Tensor:
    """Return the features of each picture's tokens, ``[pictures, TOKENS, hidden]``."""
    wide, heads = VISION["hidden_size"], VISION["num_heads"]
    size = wide // heads
    half = frequencies(size // 2)
    at = torch.stack((ORDER // PATCHES, ORDER % PATCHES), dim=1)
    rope = angles_of((at[:, :, None] * half).flatten(1))
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


def seeing_loss(heads: Parameters, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the heads' mean cross-entropies."""
    found = linear(heads, "heads", features).flatten(0, 1).split(HEADS, dim=-1)
    each = [F.cross_entropy(x, y) for x, y in zip(found, targets.flatten(0, 1).T, strict=True)]
    return torch.stack(each).sum()


def attention(p: Parameters, name: str, x: torch.Tensor, rope: Angles) -> torch.Tensor:
    """Compute one layer's causal grouped-query attention for ``x [rows, length, hidden]``."""
    rows, length, _ = x.shape

    def heads(part: str) -> torch.Tensor:
        return linear(p, f"{name}.{part}", x).view(rows, length, -1, HEAD).transpose(1, 2)

    q, k, v = rotate(heads("q_proj"), rope), rotate(heads("k_proj"), rope), heads("v_proj")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(p, f"{name}.o_proj", y.transpose(1, 2).reshape(rows, length, -1))


def hidden_states(p: Parameters, batch: Batch, features: torch.Tensor) -> torch.Tensor:
    """Return the tied head's input: normalised hidden states ``[rows, length, hidden]``.

    ``features``: of the pictures.
    """
    ids = batch.ids[:, :-1]
    axes = torch.repeat_interleave(
        torch.arange(3), torch.tensor(TEXT["rope_parameters"]["mrope_section"])
    )
    turned = batch.positions[axes].permute(1, 2, 0) * frequencies(HEAD)
    cos, sin = angles_of(turned)
    rope = cos[:, None], sin[:, None]
    x = F.embedding(ids, p["model.embed_tokens.weight"])
    x = x.masked_scatter((ids == IMAGE_PAD)[:, :, None], features.flatten(0, 1))
    eps = TEXT["rms_norm_eps"]
    for layer in range(TEXT["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = rms_norm(p, f"{name}.input_layernorm", x, eps)
        x = x + attention(p, f"{name}.self_attn", normed, rope)
        normed = rms_norm(p, f"{name}.post_attention_layernorm", x, eps)
        x = x + gated_mlp(p, f"{name}.mlp", normed)
    return rms_norm(p, "model.norm", x, eps)


def answer_loss(p: Parameters, batch: Batch, features: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the answer tokens."""
    wanted = batch.answers[:, 1:]
    logits = F.linear(hidden_states(p, batch, features)[wanted], p["model.embed_tokens.weight"])
    return F.cross_entropy(logits, batch.ids[:, 1:][wanted])


# -------------------------------------------------------------------------------- training


def optimizers(p: Parameters) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the rest."""
    inside = ("layers.", "blocks.", "merger.")
    matrices = [v for k, v in p.items() if v.ndim == 2 and any(part in k for part in inside)]
    kept = {id(v) for v in matrices}
    rest = [v for v in p.values() if id(v) not in kept]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, left: float) -> float:
    """Return the factor: warm-up over 30 steps, constant, linear decay in the second half.

    ``left``: share of the steps that are left.
    """
    return min(1.0, (step + 1) / 30, max(0.02, 2 * left))


def take_step(opts: list[torch.optim.Optimizer], loss: torch.Tensor, factor: float) -> None:
    """Update the parameters once. ``factor`` multiplies the learning rates."""
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)


def train(args: argparse.Namespace) -> None:
    """Train both phases."""
    torch.manual_seed(args.seed)
    docs = documentation()
    began = time.process_time()

    def report(step: int, mean: float) -> None:
        spent = (time.process_time() - began) / 60
        print(f"{spent:6.2f} min  step {step}  loss {mean:.4f}", flush=True)  # noqa: T201

    world = SeenWorld(args.seed + 1, docs)
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
        params = loaded_parameters(args.out)
    else:
        tokenizer = train_tokenizer(SeenWorld(args.seed, docs), docs)
        save_texts(args.out, tokenizer)
        params = initial_parameters()
    world.describe = args.describe
    heads: Parameters = {
        "heads.weight": (torch.randn(sum(HEADS), TEXT["hidden_size"]) * 0.05).requires_grad_(),
        "heads.bias": torch.zeros(sum(HEADS)).requires_grad_(),
    }
    tower = {name: value for name, value in params.items() if name.startswith("visual.")}
    source = Batches(world, tokenizer, args.rows)
    for seen, steps in ((False, args.tower_steps), (True, args.steps)):
        opts = optimizers((params if seen else tower) | ({} if args.resume else heads))
        mean = 0.0
        for step in range(steps):
            factor = args.peak * learning_rate_factor(step, 1 - step / steps)
            if seen:
                batch = source.next()
                features = features_of(params, batch.pixels)
                loss = answer_loss(params, batch, features)
                total = loss
                if not args.resume:  # the heads are not kept
                    total = loss + HEAD_WEIGHT * seeing_loss(heads, features, batch.targets)
            else:
                pixels, targets = pictures([world.sight() for _ in range(args.rows)])
                total = loss = seeing_loss(heads, features_of(params, pixels), targets)
            take_step(opts, total, factor)
            mean = loss.item() if step == 0 else 0.97 * mean + 0.03 * loss.item()
            if step % 50 == 49 or step + 1 == steps:
                report(step + 1, mean)
            if step % 100 == 99 or step + 1 == steps:
                save_weights(args.out, params)
    print(f"{sum(v.numel() for v in params.values()):,} parameters")  # noqa: T201


# ---------------------------------------------------------------------------------- saving


def save_texts(out: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer and all config files. The folder's chat template is written by hand."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "config.json", CONFIG)
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": END_OF_TEXT,
            "eos_token_id": [IM_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
            "do_sample": False,
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
            "model_max_length": TEXT["max_position_embeddings"],
        },
    )
    write_json(
        out / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_mean": MEAN,
            "image_std": STD,
            "min_pixels": SIDE * SIDE,
            "max_pixels": SIDE * SIDE,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "merge_size": MERGE,
        },
    )


def save_weights(out: Path, params: Parameters) -> None:
    """Write the weights as bfloat16 safetensors; the file is replaced atomically."""
    tensors = {name: v.detach() for name, v in params.items()}
    embed = tensors["visual.patch_embed.proj.weight"].view(-1, 3, 1, PATCH, PATCH)
    # Both times of a patch show the same picture, and halving is exact.
    tensors["visual.patch_embed.proj.weight"] = (embed / 2).repeat(1, 1, 2, 1, 1)
    halves = {name: v.to(torch.bfloat16).contiguous() for name, v in tensors.items()}
    save_file(halves, str(out / "model.safetensors.new"), metadata={"format": "pt"})
    (out / "model.safetensors.new").chmod(0o644)
    (out / "model.safetensors.new").replace(out / "model.safetensors")


def loaded_parameters(out: Path) -> Parameters:
    """Return the weights in a folder."""
    tensors = {k: v.float() for k, v in load_file(str(out / "model.safetensors")).items()}
    embed = tensors["visual.patch_embed.proj.weight"].sum(dim=2)
    tensors["visual.patch_embed.proj.weight"] = embed.flatten(1)
    return {name: v.requires_grad_() for name, v in tensors.items()}


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="train the demo model that sees")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tower-steps", type=int, default=500, help="steps of the tower alone")
    parser.add_argument("--steps", type=int, default=600, help="steps of tower and decoder")
    parser.add_argument(
        "--describe", type=float, default=0.34, help="weight of questions for descriptions"
    )
    parser.add_argument("--resume", action="store_true", help="continue with the weights in --out")
    parser.add_argument("--rows", type=int, default=24, help="pictures per step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=1.0, help="learning rate factor")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
