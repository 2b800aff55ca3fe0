"""A random Granite folder, and the Llama that computes the same: its weights have the multipliers.

They are powers of two, so that both compute equal bits in float32.
"""

import json
from pathlib import Path

from baton.benchmarks.checkpoints import Shape, write_checkpoint, write_config, write_tensors
from baton.engine.loading.checkpoint import load_checkpoint

SHAPE = Shape("tiny", 1024, 64, 96, 3, 4, 2, positions=1024)
EMBEDDING, RESIDUAL, LOGITS, ATTENTION = 4.0, 0.5, 2.0, 0.5
MULTIPLIERS = {
    "embedding_multiplier": EMBEDDING,
    "residual_multiplier": RESIDUAL,
    "logits_scaling": LOGITS,
    "attention_multiplier": ATTENTION * SHAPE.head_dim**-0.5,
}
IN_WEIGHTS = {
    "embed_tokens": EMBEDDING,
    "o_proj": RESIDUAL,
    "down_proj": RESIDUAL,
    "model.norm": 1 / LOGITS,
    "q_proj": ATTENTION,
}


def granite_folder(folder: Path, **changes) -> Path:
    """Write the Granite; ``changes``: of its config.json."""
    write_checkpoint(folder, SHAPE, "F32", seed=7)
    config = {**SHAPE.config("F32"), **MULTIPLIERS, "model_type": "granite"}
    config |= {"architectures": ["GraniteForCausalLM"], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def equal_llama(folder: Path) -> Path:
    """Write the Llama with equal results."""
    write_checkpoint(folder / "plain", SHAPE, "F32", seed=7)
    plain = load_checkpoint(folder / "plain")
    write_config(folder, SHAPE, "F32")

    def scaled(name: str, size: tuple[int, ...]) -> list[bytes]:
        factor = next((by for part, by in IN_WEIGHTS.items() if part in name), 1.0)
        return [(plain.take(name, size) * factor).astype("<f4").tobytes()]

    write_tensors(folder / "model.safetensors", SHAPE.tensors(), "F32", scaled)
    return folder
