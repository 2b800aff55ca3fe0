"""The engine's measurements on vLLM's CPU build; run by a Python that has it, without Baton.

``python vllm_peer.py FOLDER DTYPE PROMPT CONTEXT STEPS`` answers each line of standard
input, the name of a measurement, with a line of tokens per second, until the input ends.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # one thread comes from the environment
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Peer:
    """A model in one thread, decoding greedily without prefix cache."""

    def __init__(self, folder: str, dtype: str, prompt: int, context: int, steps: int) -> None:
        import vllm

        self.vllm: Any = vllm
        self.model: Any = vllm.LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=2 * prompt,
            max_num_seqs=8,
            disable_log_stats=True,
        )
        vocab = self.model.llm_engine.model_config.get_vocab_size()
        rng = random.Random(1)
        self.ids = [[rng.randrange(4, vocab) for _ in range(prompt)] for _ in range(8)]
        self.prompt, self.context, self.steps = prompt, context, steps

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Time to generate ``tokens`` for each prompt."""
        params = self.vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        self.model.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    def prefill(self) -> float:
        """Tokens per second of one prompt."""
        return self.prompt / self.seconds([self.ids[0]], 1)

    def decode(self, streams: int) -> float:
        """Tokens per second of ``streams`` requests in a batch, after the first token."""
        prompts = [p[: self.context] for p in self.ids[:streams]]
        first = self.seconds(prompts, 1)
        return streams * self.steps / (self.seconds(prompts, 1 + self.steps) - first)


def main() -> None:
    """Answer until the input ends."""
    folder, dtype, *numbers = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's prints must not mix with the answers
    peer = Peer(folder, dtype, *map(int, numbers))
    for line in sys.stdin:
        name = line.strip()
        rate = peer.prefill() if name == "prefill" else peer.decode(int(name[7:]))
        print(rate, file=out, flush=True)


if __name__ == "__main__":
    main()
