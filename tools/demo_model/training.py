"""Train the demo model: ``python -m baton.tools.demo_model.training --out deploy/demo_model``.

This script needs torch, safetensors and tokenizers; no other module imports it. It trains a
byte-level BPE tokenizer on the micro-world and CPython's documentation. Then it trains a Llama with
less than a million parameters on conversations of the micro-world; only answer tokens contribute to
the loss. It writes a Hugging Face folder in bfloat16 every two minutes and at the end. The
parameters are a dict with the checkpoint's tensor names.
"""
# mypy: disable-error-code="no-any-return"
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from safetensors.torch import load_file
from tokenizers import Tokenizer

from .corpus import MicroWorld, documentation
from .networks import (
    END_OF_TEXT,
    IM_END,
    SPECIALS,
    Parameters,
    Rope,
    answer_loss,
    byte_level_bpe,
    decoder_shapes,
    decoder_states,
    initial_parameters,
    optimizers,
    rope_of,
    save_texts,
    save_weights,
    take_step,
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
    "pad_token_id": END_OF_TEXT,
    "torch_dtype": "bfloat16",
}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
ROW_LENGTHS, ROW_WEIGHTS = (128, 256, 512, 1024), (0.5, 0.3, 0.13, 0.07)


# ------------------------------------------------------------------------------- tokenizer


def train_tokenizer(world: MicroWorld, docs: list[str]) -> Tokenizer:
    """Train a byte-level BPE in which almost every word of the micro-world is one token."""
    chats = ["\n".join(world.turn()) for _ in range(6000)]
    return byte_level_bpe(chats + docs[::6], CONFIG["vocab_size"], SPECIALS)


# --------------------------------------------------------------------------------- batches


def conversation(
    world: MicroWorld, tokenizer: Tokenizer, length: int
) -> tuple[list[int], list[bool]]:
    """Return ``length + 1`` token ids of a conversation, and a mask of the answer tokens."""
    ids: list[int] = []
    answers: list[bool] = []

    def append(text: str, answer: bool) -> None:
        new = tokenizer.encode(text).ids
        ids.extend(new)
        answers.extend([answer] * len(new))

    system = world.system_message()
    if system is not None:
        append(f"<|im_start|>system\n{system}<|im_end|>\n", False)
    while len(ids) <= length:
        question, answer = world.turn()
        append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False)
        append(f"{answer}<|im_end|>", True)
        append("\n", False)
    return ids[: length + 1], answers[: length + 1]


def batches(
    world: MicroWorld, tokenizer: Tokenizer, tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of ``ids [rows, length + 1]`` and answer masks of the same shape, forever.

    ``tokens``: maximum of ``rows * length``.
    """
    while True:
        length = world.rng.choices(ROW_LENGTHS, ROW_WEIGHTS)[0]
        rows = [conversation(world, tokenizer, length) for _ in range(tokens // length)]
        yield torch.tensor([ids for ids, _ in rows]), torch.tensor([mask for _, mask in rows])


# ----------------------------------------------------------------------------------- model


def random_parameters() -> Parameters:
    """Return the parameters before training."""
    shapes = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], CONFIG["hidden_size"]),
        "model.norm.weight": (CONFIG["hidden_size"],),
        **decoder_shapes(CONFIG, bias=False),
    }
    return initial_parameters(shapes, {"model": CONFIG["num_hidden_layers"]})


def rope_tables(length: int) -> Rope:
    """Return RoPE's cosines and sines, each ``[length, head_dim]``."""
    half = torch.arange(0, CONFIG["head_dim"], 2) / CONFIG["head_dim"]
    return rope_of(torch.arange(length)[:, None] / CONFIG["rope_theta"] ** half)


def loss_of(p: Parameters, ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the answer tokens."""
    x = F.embedding(ids[:, :-1], p["model.embed_tokens.weight"])
    return answer_loss(p, decoder_states(p, CONFIG, x, rope_tables(x.shape[1])), ids, answers)


# -------------------------------------------------------------------------------- training


def learning_rate_factor(step: int, progress: float) -> float:
    """Return the factor: warm-up over 30 steps, constant, linear decay in the last 45 %.

    ``progress``: elapsed share of the training time.
    """
    return min(1.0, (step + 1) / 30, max(0.01, (1.0 - progress) / 0.45))


def starting_point(
    out: Path, seed: int, docs: list[str], resume: bool
) -> tuple[Tokenizer, Parameters]:
    """Return a new tokenizer and random weights, or with ``resume`` those in ``out``."""
    if resume:
        tensors = load_file(str(out / "model.safetensors"))
        params = {name: v.float().requires_grad_() for name, v in tensors.items()}
        return Tokenizer.from_file(str(out / "tokenizer.json")), params
    tokenizer = train_tokenizer(MicroWorld(seed, docs), docs)
    save_texts(out, tokenizer, CONFIG, SAMPLING)
    return tokenizer, random_parameters()


def train(args: argparse.Namespace) -> None:
    """Train for ``args.minutes`` of CPU time with ``args.tokens`` tokens per step."""
    torch.manual_seed(args.seed)
    docs = documentation()
    tokenizer, params = starting_point(args.out, args.seed, docs, args.resume)
    opts = optimizers(params, ["layers"], 4e-3)
    source = batches(MicroWorld(args.seed + 1, docs), tokenizer, args.tokens)
    began, saved, mean, step, progress = time.process_time(), 0.0, 0.0, 0, 0.0
    while progress < 1.0:
        factor = args.peak * learning_rate_factor(step, progress)
        loss = loss_of(params, *next(source))
        take_step(opts, loss, factor)
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        step += 1
        spent = (time.process_time() - began) / 60
        progress = spent / args.minutes
        if step % 50 == 0:
            print(f"{spent:6.2f} min  step {step}  loss {mean:.4f}", flush=True)  # noqa: T201
        if spent - saved > 2 or progress >= 1.0:
            saved = spent
            save_weights(args.out, params)
    print(f"{sum(v.numel() for v in params.values()):,} parameters, loss {mean:.4f}")  # noqa: T201


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="train the demo model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0, help="CPU minutes of training")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=1.0, help="learning rate factor")
    parser.add_argument("--resume", action="store_true", help="continue with the weights in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
