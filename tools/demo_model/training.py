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
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import MicroWorld, documentation

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, _, IM_END = range(3)
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
ROW_LENGTHS, ROW_WEIGHTS = (128, 256, 512, 1024), (0.5, 0.3, 0.13, 0.07)

Parameters = dict[str, torch.Tensor]
Rope = tuple[torch.Tensor, torch.Tensor]


# ------------------------------------------------------------------------------- tokenizer


def train_tokenizer(world: MicroWorld, docs: list[str]) -> Tokenizer:
    """Train a byte-level BPE in which almost every word of the micro-world is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    chats = ["\n".join(world.turn()) for _ in range(6000)]
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chats + docs[::6], trainer)
    return tokenizer


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


def initial_parameters() -> Parameters:
    """Return random parameters: normal with standard deviation ``fan_in ** -0.5``.

    The output projections of each layer are smaller by ``sqrt(2 * layers)``.
    """
    hidden, ffn, depth = (
        CONFIG[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    q_rows = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    kv_rows = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes = {
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    params: Parameters = {
        "model.embed_tokens.weight": torch.randn(CONFIG["vocab_size"], hidden) * 0.05,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(depth):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            params[f"{prefix}.{name}.weight"] = torch.ones(hidden)
        for name, shape in shapes.items():
            scale = shape[1] ** -0.5
            if name.endswith(("o_proj", "down_proj")):
                scale /= math.sqrt(2 * depth)
            params[f"{prefix}.{name}.weight"] = torch.randn(shape) * scale
    return {name: p.requires_grad_() for name, p in params.items()}


def rope_tables(length: int) -> Rope:
    """Return RoPE's cosines and sines, each ``[length, head_dim]``."""
    half = torch.arange(0, CONFIG["head_dim"], 2) / CONFIG["head_dim"]
    angles = torch.arange(length)[:, None] / CONFIG["rope_theta"] ** half
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Apply RoPE to ``x [..., length, head_dim]``."""
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def attention(p: Parameters, prefix: str, x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Compute one layer's causal grouped-query attention for ``x [rows, length, hidden]``."""
    rows, length, _ = x.shape

    def heads(name: str) -> torch.Tensor:
        y = F.linear(x, p[f"{prefix}.{name}.weight"])
        return y.view(rows, length, -1, CONFIG["head_dim"]).transpose(1, 2)

    q, k, v = rotate(heads("q_proj"), rope), rotate(heads("k_proj"), rope), heads("v_proj")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).reshape(rows, length, -1), p[f"{prefix}.o_proj.weight"])


def hidden_states(p: Parameters, ids: torch.Tensor) -> torch.Tensor:
    """Return the tied head's input: normalised hidden states ``[rows, length, hidden]``."""
    rope = rope_tables(ids.shape[1])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], p[f"{name}.weight"], CONFIG["rms_norm_eps"])

    x = F.embedding(ids, p["model.embed_tokens.weight"])
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        x = x + attention(p, f"{prefix}.self_attn", norm(x, f"{prefix}.input_layernorm"), rope)
        y = norm(x, f"{prefix}.post_attention_layernorm")
        gate, up = (F.linear(y, p[f"{prefix}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, p[f"{prefix}.mlp.down_proj.weight"])
    return norm(x, "model.norm")


def answer_loss(p: Parameters, ids: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the answer tokens."""
    wanted = answers[:, 1:]
    logits = F.linear(hidden_states(p, ids[:, :-1])[wanted], p["model.embed_tokens.weight"])
    return F.cross_entropy(logits, ids[:, 1:][wanted])


# -------------------------------------------------------------------------------- training


def optimizers(p: Parameters) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embedding and the norms."""
    matrices = [v for k, v in p.items() if v.ndim == 2 and "layers" in k]
    rest = [v for k, v in p.items() if v.ndim == 1 or "layers" not in k]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


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
    save_tokenizer(out, tokenizer)
    return tokenizer, initial_parameters()


def take_step(
    params: Parameters,
    opts: list[torch.optim.Optimizer],
    batch: tuple[torch.Tensor, torch.Tensor],
    factor: float,
) -> float:
    """Update the parameters once; return the loss before the update.

    ``factor`` multiplies the learning rates.
    """
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
    loss = answer_loss(params, *batch)
    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)
    return float(loss.item())


def train(args: argparse.Namespace) -> None:
    """Train for ``args.minutes`` of CPU time with ``args.tokens`` tokens per step."""
    torch.manual_seed(args.seed)
    docs = documentation()
    tokenizer, params = starting_point(args.out, args.seed, docs, args.resume)
    opts = optimizers(params)
    source = batches(MicroWorld(args.seed + 1, docs), tokenizer, args.tokens)
    began, saved, mean, step, progress = time.process_time(), 0.0, 0.0, 0, 0.0
    while progress < 1.0:
        factor = args.peak * learning_rate_factor(step, progress)
        loss = take_step(params, opts, next(source), factor)
        mean = loss if step == 0 else 0.98 * mean + 0.02 * loss
        step += 1
        spent = (time.process_time() - began) / 60
        progress = spent / args.minutes
        if step % 50 == 0:
            print(f"{spent:6.2f} min  step {step}  loss {mean:.4f}", flush=True)  # noqa: T201
        if spent - saved > 2 or progress >= 1.0:
            saved = spent
            save_weights(args.out, params)
    print(f"{sum(v.numel() for v in params.values()):,} parameters, loss {mean:.4f}")  # noqa: T201


# ---------------------------------------------------------------------------------- saving


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_tokenizer(out: Path, tokenizer: Tokenizer) -> None:
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
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.9,
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
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )


def save_weights(out: Path, params: Parameters) -> None:
    """Write the weights as bfloat16 safetensors; the file is replaced atomically."""
    tensors = {name: v.detach().to(torch.bfloat16).contiguous() for name, v in params.items()}
    save_file(tensors, str(out / "model.safetensors.new"), metadata={"format": "pt"})
    (out / "model.safetensors.new").chmod(0o644)
    (out / "model.safetensors.new").replace(out / "model.safetensors")


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
