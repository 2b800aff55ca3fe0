"""The engine's measurements on llama.cpp; run by a Python that has llama-cpp-python, without Baton.

``python llama_peer.py FILE THREADS PROMPT CONTEXT STEPS`` answers each line of standard input, the
name of a measurement, with a line of tokens per second, until the input ends: of processor time
with one thread, of wall time with several.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

STREAMS = 8


class Peer:
    """A model that decodes greedily."""

    def __init__(self, path: str, threads: int, prompt: int, context: int, steps: int) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = STREAMS * (prompt + context)
        settings.n_batch = settings.n_ubatch = prompt
        settings.n_seq_max = STREAMS
        settings.n_threads = settings.n_threads_batch = threads
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.run: Any = llama_cpp.llama_init_from_model(model, settings)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(STREAMS * prompt, 0, 1)
        self.ids = np.random.default_rng(1).integers(4, self.vocab, (STREAMS, prompt))
        self.prompt, self.context, self.steps = prompt, context, steps

    def step(self, rows: list[tuple[int, int, list[int]]]) -> list[int]:
        """Run ``(stream, first position, tokens)``; return the best next token of each."""
        count, last = 0, []
        for stream, first, tokens in rows:
            for at, token in enumerate(tokens):
                self.batch.token[count] = token
                self.batch.pos[count] = first + at
                self.batch.n_seq_id[count] = 1
                self.batch.seq_id[count][0] = stream
                self.batch.logits[count] = at + 1 == len(tokens)
                count += 1
            last.append(count - 1)
        self.batch.n_tokens = count
        if llama_cpp.llama_decode(self.run, self.batch):
            raise RuntimeError("llama_decode failed")
        found = []
        for at in last:
            logits = llama_cpp.llama_get_logits_ith(self.run, at)
            found.append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
        return found

    def forget(self) -> None:
        """Empty the cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.run), False)  # noqa: FBT003

    def prefill(self) -> float:
        """Tokens per second of one prompt."""
        self.forget()
        began = self.clock()
        self.step([(0, 0, self.ids[0].tolist())])
        return self.prompt / (self.clock() - began)

    def decode(self, streams: int) -> float:
        """Tokens per second of ``streams`` requests in a batch."""
        self.forget()
        last = []
        for i in range(streams):
            last += self.step([(i, 0, self.ids[i, : self.context].tolist())])
        began = self.clock()
        for at in range(self.context, self.context + self.steps):
            last = self.step([(i, at, [token]) for i, token in enumerate(last)])
        return streams * self.steps / (self.clock() - began)


def main() -> None:
    """Answer until the input ends."""
    path, *numbers = sys.argv[1:]
    peer = Peer(path, *map(int, numbers))
    for line in sys.stdin:
        name = line.strip()
        rate = peer.prefill() if name == "prefill" else peer.decode(int(name[7:]))
        print(rate, flush=True)


if __name__ == "__main__":
    main()
