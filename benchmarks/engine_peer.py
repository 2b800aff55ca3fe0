"""The engine's measurements on transformers; run by a Python that has torch, without Baton.

``python engine_peer.py FOLDER DTYPE PROMPT CONTEXT STEPS`` answers each line of standard
input, the name of a measurement, with a line of tokens per second, until the input ends.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import transformers


class Peer:
    """A model with a cache, decoding greedily."""

    def __init__(self, folder: str, dtype: str, prompt: int, context: int, steps: int) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        kind = getattr(torch, dtype)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
        self.ids = torch.randint(4, self.model.config.vocab_size, (8, prompt))
        self.prompt, self.context, self.steps = prompt, context, steps

    def prefill(self) -> float:
        """Tokens per second of one prompt."""
        began = time.perf_counter()
        self.model(input_ids=self.ids[:1], use_cache=True, logits_to_keep=1)
        return self.prompt / (time.perf_counter() - began)

    def decode(self, streams: int) -> float:
        """Tokens per second of ``streams`` requests in a batch."""
        prompt = self.ids[:streams, : self.context]
        out = self.model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        began = time.perf_counter()
        for _ in range(self.steps):
            last = out.logits[:, -1].argmax(-1)[:, None]
            out = self.model(input_ids=last, past_key_values=out.past_key_values, use_cache=True)
        return streams * self.steps / (time.perf_counter() - began)


def main() -> None:
    """Answer until the input ends."""
    folder, dtype, *numbers = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    peer = Peer(folder, dtype, *map(int, numbers))
    with torch.inference_mode():
        for line in sys.stdin:
            name = line.strip()
            rate = peer.prefill() if name == "prefill" else peer.decode(int(name[7:]))
            print(rate, flush=True)


if __name__ == "__main__":
    main()
