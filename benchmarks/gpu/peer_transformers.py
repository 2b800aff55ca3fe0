"""transformers at its fastest for one stream: compiled, with a static cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def decode_times(folder: Path, context: int, steps: int, *, gpu: bool) -> list[float]:
    """Seconds of each decode step after ``context`` tokens, from a token to the next."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    where = "cuda" if gpu else "cpu"
    kind: Any = torch.bfloat16
    load = transformers.AutoModelForCausalLM.from_pretrained
    model: Any = load(folder, dtype=kind).to(where).eval()
    warm = 8
    cache = transformers.StaticCache(config=model.config, max_cache_len=context + steps + warm + 1)
    compiled: Any = torch.compile(model, mode="reduce-overhead" if gpu else "default")
    ids = torch.randint(4, model.config.vocab_size, (1, context), device=where)
    times = []
    with torch.inference_mode():
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        for step in range(steps + warm):
            began = time.perf_counter()
            if gpu:
                torch.compiler.cudagraph_mark_step_begin()
            out = compiled(
                input_ids=token, past_key_values=cache, use_cache=True,
                position_ids=torch.tensor([[context + step]], device=where),
            )  # fmt: skip
            token = out.logits[:, -1:].argmax(-1).clone()
            token.item()
            times.append(time.perf_counter() - began)
    return times[warm:]
