"""``baton serve`` with a prefill and a decode worker on one GPU, beside the CPU's float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from baton.client import Client
from baton.engine.kernels.load import load_backend
from baton.engine.loading.loader import Runner
from baton.proto.sampling import SamplingParams

from ..served import Served
from .lines import Line, checked
from .models import SMALL, forced_logits, load, write
from .stage import Stage

NEAR_TIE = 0.1
"""In standard deviations of the logits: rounding to bf16 on the way moves them by up to 0.02."""


def serving(stage: Stage) -> Iterator[Line]:
    """Tokens, the transport of the handoffs, equal draws for equal seeds."""
    folder = write(stage, SMALL)
    rng = np.random.default_rng(3)
    longest, count = stage.size(700, 40), stage.size(48, 6)
    lengths = [1, 2, 15, 16, 17, longest // 3, longest // 2, longest]
    reference = load(folder, load_backend("auto"), blocks=longest // 16 + count)
    prompts = [rng.integers(0, reference.card.vocab_size, n).tolist() for n in lengths]
    flags = (*stage.flags, f"--kv-blocks={stage.size(1024, 64)}", "--max-num-batched-tokens=256")
    with Served(stage.scratch, folder, flags=flags) as served:
        greedy = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
        found = _generated(served.client, prompts, greedy)
        yield _beside_the_reference(reference, prompts, found)
        drawn = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_new_tokens=count)
        twice = [_generated(served.client, prompts[-3:], drawn) for _ in range(2)]
        yield checked(
            "a seed draws the same again", twice[0] == twice[1], f"{len(twice[0])} requests"
        )
        yield _transports(served.client, stage)
    yield checked(
        "the cluster has ended", not first_error(served.log), first_error(served.log) or "cleanly"
    )


def _generated(
    client: Client, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[int]]:
    streams = [client.generate(prompt, params) for prompt in prompts]
    return [[token for output in stream for token in output.tokens] for stream in streams]


def _beside_the_reference(
    reference: Runner, prompts: Sequence[Sequence[int]], found: Sequence[Sequence[int]]
) -> Line:
    """Every token must be the reference's for the tokens before it, or nearly tie with it."""
    equal = ties = wrong = 0
    for prompt, tokens in zip(prompts, found, strict=True):
        logits = forced_logits(reference, [*prompt, *tokens], len(prompt) + len(tokens))
        for row, token in zip(logits[len(prompt) - 1 :], tokens, strict=False):
            gap = float(row.max() - row[token]) / float(row.std())
            equal += gap == 0
            ties += 0 < gap <= NEAR_TIE
            wrong += gap > NEAR_TIE
    result = f"{equal} equal, {ties} near-ties, {wrong} wrong"
    right = not wrong and equal > 0 and all(len(t) == len(found[0]) for t in found)
    return checked(
        "tokens beside the CPU's float32", right, result, "0 wrong", equal=equal, ties=ties
    )


def _transports(client: Client, stage: Stage) -> Line:
    handoffs = client.status(handoffs=64)["handoffs"]["last"]
    names = sorted({handoff["transport"] for handoff in handoffs})
    wanted = "cuda_ipc" if stage.cupy is not None else "shm"
    result = f"{', '.join(names)} for {len(handoffs)} handoffs"
    return checked("how blocks travelled", names == [wanted], result, wanted)


def first_error(log: Path) -> str:
    """The first line of the log that speaks of an error."""
    lines = log.read_text(errors="replace").splitlines()
    return next((x[:200] for x in lines if "error" in x.lower() or "Traceback" in x), "")
