"""Cards of models that do not exist, for tests of code that computes nothing."""

from typing import Any

from baton.proto.layout import KVLayout, ModelCard


def model_card(**fields: Any) -> ModelCard:
    """Return a card of a small model with these ``fields``."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4)
    defaults: dict[str, Any] = {
        "name": "m", "architecture": "a", "fingerprint": "f", "numerics": "n", "vocab_size": 100,
        "max_length": 64, "eos_token_ids": [2], "layout": layout,
    }  # fmt: skip
    return ModelCard(**{**defaults, **fields})
