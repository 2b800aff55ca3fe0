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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from safetensors.torch import load_file
from tokenizers import Tokenizer

from baton.deploy.demo_shapes import SHAPES, SIDE

from .corpus import documentation
from .networks import (
    END_OF_TEXT,
    IM_END,
    MEAN,
    MERGE,
    PATCH,
    PATCHES,
    STD,
    TOKENS,
    VISION,
    Parameters,
    Shapes,
    answer_loss,
    byte_level_bpe,
    decoder_shapes,
    decoder_states,
    features_of,
    frequencies,
    head_size,
    initial_parameters,
    linear,
    optimizers,
    rope_of,
    save_texts,
    save_weights,
    take_step,
    tower_shapes,
    write_json,
)
from .networks import SPECIALS as TEXT_SPECIALS
from .sights import AGAIN, COLOUR_NAMES, OPPOSITE, PLACES, SeenWorld, Sight, description, labels

SPECIALS = (
    *TEXT_SPECIALS,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(len(TEXT_SPECIALS), len(SPECIALS))
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


# ------------------------------------------------------------------------------- tokenizer


def train_tokenizer(world: SeenWorld, docs: list[str]) -> Tokenizer:
    """Train a byte-level BPE in which every word of the questions and answers is one token."""
    turns = ["\n".join(world.turn(world.sight())) for _ in range(6000)]
    return byte_level_bpe([*turns, AGAIN, *docs[::60]], TEXT["vocab_size"], SPECIALS)


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


def shapes() -> Shapes:
    """Return the shape of every trained tensor."""
    return {
        "model.embed_tokens.weight": (TEXT["vocab_size"], TEXT["hidden_size"]),
        "model.norm.weight": (TEXT["hidden_size"],),
        **tower_shapes(),
        **decoder_shapes(TEXT, bias=True),
    }


def seeing_loss(heads: Parameters, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the heads' mean cross-entropies."""
    found = linear(heads, "heads", features).flatten(0, 1).split(HEADS, dim=-1)
    each = [F.cross_entropy(x, y) for x, y in zip(found, targets.flatten(0, 1).T, strict=True)]
    return torch.stack(each).sum()


def loss_of(p: Parameters, batch: Batch, features: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the answer tokens. ``features``: of the pictures."""
    ids = batch.ids[:, :-1]
    axes = torch.repeat_interleave(
        torch.arange(3), torch.tensor(TEXT["rope_parameters"]["mrope_section"])
    )
    cos, sin = rope_of(batch.positions[axes].permute(1, 2, 0) * frequencies(head_size(TEXT)))
    x = F.embedding(ids, p["model.embed_tokens.weight"])
    x = x.masked_scatter((ids == IMAGE_PAD)[:, :, None], features.flatten(0, 1))
    states = decoder_states(p, TEXT, x, (cos[:, None], sin[:, None]))
    return answer_loss(p, states, batch.ids, batch.answers)


# -------------------------------------------------------------------------------- training


def learning_rate_factor(step: int, left: float) -> float:
    """Return the factor: warm-up over 30 steps, constant, linear decay in the second half.

    ``left``: share of the steps that are left.
    """
    return min(1.0, (step + 1) / 30, max(0.02, 2 * left))


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
        save_files(args.out, tokenizer)
        depths = {"model": TEXT["num_hidden_layers"], "visual": VISION["depth"]}
        params = initial_parameters(shapes(), depths)
    world.describe = args.describe
    heads: Parameters = {
        "heads.weight": (torch.randn(sum(HEADS), TEXT["hidden_size"]) * 0.05).requires_grad_(),
        "heads.bias": torch.zeros(sum(HEADS)).requires_grad_(),
    }
    tower = {name: value for name, value in params.items() if name.startswith("visual.")}
    source = Batches(world, tokenizer, args.rows)
    for seen, steps in ((False, args.tower_steps), (True, args.steps)):
        trained = (params if seen else tower) | ({} if args.resume else heads)
        opts = optimizers(trained, ["layers.", "blocks.", "merger."], 3e-3)
        mean = 0.0
        for step in range(steps):
            factor = args.peak * learning_rate_factor(step, 1 - step / steps)
            if seen:
                batch = source.next()
                features = features_of(params, batch.pixels)
                loss = loss_of(params, batch, features)
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
                save_weights(args.out, checkpoint_of(params))
    print(f"{sum(v.numel() for v in params.values()):,} parameters")  # noqa: T201


# ---------------------------------------------------------------------------------- saving


def save_files(out: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer and all config files. The folder's chat template is written by hand."""
    save_texts(out, tokenizer, CONFIG, {"do_sample": False})
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


def checkpoint_of(params: Parameters) -> Parameters:
    """Return the checkpoint's tensors: both times of a patch show one picture; halving is exact."""
    embed = params["visual.patch_embed.proj.weight"].detach().view(-1, 3, 1, PATCH, PATCH)
    return params | {"visual.patch_embed.proj.weight": (embed / 2).repeat(1, 1, 2, 1, 1)}


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
