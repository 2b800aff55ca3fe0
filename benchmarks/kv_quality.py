"""Types of keys and values beside each other: how far they move a model's predictions.

``python -m baton.benchmarks.kv_quality MODEL [--text FILE] [--tokens N] [--context N]``. The model
reads a text in contexts of ``--context`` tokens, in chunks of 128. The distributions of each next
token are compared with those of float32 keys and values: mean and largest KL divergence, share of
equal likeliest tokens, and the perplexity of the text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from baton.engine.loading.gguf_folder import local_folder
from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.scheduling.plan import Chunk
from baton.proto.layout import KV_TYPES
from baton.runtime.process.os_settings import limit_blas_threads
from baton.text.tokenizer import Tokenizer

CHUNK, BLOCK = 128, 16
README = Path(__file__).resolve().parents[1] / "README.md"
F32 = npt.NDArray[np.float32]


@dataclass
class Distances:
    """Distances of one type from the reference, a number for each position."""

    divergence: list[float] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)
    surprise: list[float] = field(default_factory=list)

    def add(self, wanted: F32, found: F32, following: npt.NDArray[np.int32]) -> None:
        """Add the positions of a chunk. ``following``: the next tokens, for the first rows."""
        terms = np.exp(wanted)
        terms *= wanted - found
        self.divergence += terms.sum(axis=1, dtype=np.float64).tolist()
        self.agreed += (wanted.argmax(axis=1) == found.argmax(axis=1)).tolist()
        self.surprise += (-found[np.arange(len(following)), following]).tolist()

    def row(self, kind: str, token_bytes: int) -> str:
        """The line of the table."""
        mean, worst = np.mean(self.divergence), np.max(self.divergence)
        agreed, perplexity = np.mean(self.agreed), np.exp(np.mean(self.surprise))
        return f"{kind:10}{token_bytes:12}{mean:14.2e}{worst:14.2e}{agreed:12.4f}{perplexity:14.4f}"


def chunks(tokens: npt.NDArray[np.int32], context: int) -> Iterator[tuple[Chunk, int]]:
    """Yield the chunks of all contexts, and where each begins in the text."""
    table = np.arange(-(-context // BLOCK), dtype=np.int32)
    for begin in range(0, len(tokens), context):
        end = min(begin + context, len(tokens))
        for start in range(begin, end, CHUNK):
            part = tokens[start : min(start + CHUNK, end)]
            yield Chunk(b"x", start - begin, part, table), start


def log_probs(runner: Runner, chunk: Chunk) -> F32:
    """Return the log-probabilities of all next tokens, ``[tokens, vocabulary]``."""
    model = runner.pipeline.model
    rows = np.arange(len(chunk.tokens), dtype=np.int32)
    inputs = replace(model.prepare_initial_token_inputs([chunk]), logit_rows=rows)
    logits = model.execute(inputs).next_token_logits
    if logits is None:
        raise RuntimeError("the model gave no logits")
    found: F32 = logits - logits.max(axis=1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=1, keepdims=True))
    return found


def compare(
    runners: dict[str, Runner], tokens: npt.NDArray[np.int32], context: int
) -> dict[str, Distances]:
    """Return the distances of each type from the first one."""
    found = {kind: Distances() for kind in runners}
    for chunk, start in chunks(tokens, context):
        following = tokens[start + 1 : start + len(chunk.tokens) + 1]
        wanted = None
        for kind, runner in runners.items():
            own = log_probs(runner, chunk)
            wanted = own if wanted is None else wanted
            found[kind].add(wanted, own, following)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    limit_blas_threads(1)
    parser = argparse.ArgumentParser(prog="kv_quality", description=__doc__)
    parser.add_argument("model", help="a folder or GGUF file")
    parser.add_argument("--text", type=Path, default=README, help="the text, by default README.md")
    parser.add_argument("--tokens", type=int, default=4096, help="the most tokens of it")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.from_folder(local_folder(args.model))
    tokens = tokenizer.encode(args.text.read_text())[: args.tokens].astype(np.int32)
    config = RunnerConfig(
        model=args.model, num_blocks=-(-args.context // BLOCK), block_size=BLOCK,
        max_length=args.context, threads=args.threads,
    )  # fmt: skip
    runners = {
        kind: load_runner(msgspec.structs.replace(config, kv_type=kind)) for kind in KV_TYPES
    }
    print(f"{args.model}: {len(tokens)} tokens of {args.text.name}, contexts of {args.context}")
    head = f"{'type':10}{'bytes/token':>12}{'KL mean':>14}{'KL worst':>14}"
    print(f"{head}{'top-1':>12}{'perplexity':>14}")
    for kind, distances in compare(runners, tokens, args.context).items():
        print(distances.row(kind, runners[kind].card.layout.token_bytes), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
