"""A prefill and a decode worker on one GPU, which serve a model through router and client."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...client import AsyncClient
from ...proto.sampling import SamplingParams
from ..served import Served
from .lines import Line, checked, measured
from .stage import Stage, readable

HANDOFF_BAR_S = 5e-3
"""For 8,192 tokens of a model with the shapes of Llama-3.1-8B: 1 GiB of keys and values."""
STREAMS = 64


def served_model(stage: Stage, folder: Path) -> Iterator[Line]:
    """Times to the first token, handoffs, one stream and many; what the cluster logs is printed."""
    longest = stage.size(8192, 40)
    streams, tokens = stage.size(STREAMS, 3), stage.size(128, 6)
    blocks = 2 * longest // 16 + streams * (-(-(512 + tokens) // 16))
    flags = (
        *stage.flags, f"--kv-blocks={stage.size(blocks, 64)}", f"--max-num-seqs={STREAMS}",
        f"--prefill-max-num-seqs={STREAMS}", f"--max-num-batched-tokens={longest}",
        "--step-time=0",
    )  # fmt: skip
    began = time.monotonic()
    with Served(stage.scratch, folder, flags=flags) as served:
        ready = time.monotonic() - began
        print(served.log.read_text(errors="replace")[-2000:], flush=True)
        yield Line("cluster ready", readable(ready), figures={"seconds": ready})
        try:
            vocab = served.client.describe().card.vocab_size
            yield from asyncio.run(_measured(stage, served, vocab, longest, streams, tokens))
        finally:
            print(served.log.read_text(errors="replace")[-4000:], flush=True)


async def _measured(
    stage: Stage, served: Served, vocab: int, longest: int, streams: int, tokens: int
) -> list[Line]:
    rng = np.random.default_rng(13)
    lines = []

    def prompt(length: int) -> list[int]:
        found: list[int] = rng.integers(0, vocab, length).tolist()
        return found

    async with AsyncClient(served.address) as client:
        for length in (stage.size(512, 16), stage.size(2048, 24), longest):
            firsts = []
            for turn in range(stage.size(7, 2)):
                times = await _one(client, prompt(length), 2)
                firsts += times[:1] if turn else []
            await asyncio.sleep(0.2)  # the handoff of the last is still being reported
            status = await client.status(requests=len(firsts))
            lines += [_first_token(length, firsts), _handoff(length, status, length == longest)]
        times = await _one(client, prompt(stage.size(512, 16)), tokens)
        steps = np.diff(times[2:])
        lines.append(
            Line(
                "one stream",
                f"{1 / statistics.median(steps):.0f} tok/s, {readable(statistics.median(steps))} "
                f"between tokens (p99 {readable(float(np.quantile(steps, 0.99)))})",
                figures={"seconds": float(statistics.median(steps))},
            )
        )
        began = time.perf_counter()
        prompts = [prompt(stage.size(512, 16)) for _ in range(streams)]
        found = await asyncio.gather(*(_one(client, each, tokens) for each in prompts))
        seconds = time.perf_counter() - began
        gaps = np.array([(times[-1] - times[0]) / (tokens - 1) for times in found])
        rate = streams * tokens / seconds
        lines.append(
            Line(
                f"{streams} streams, {tokens} tokens each",
                f"{rate:.0f} tok/s, {readable(float(np.median(gaps)))} per token "
                f"(slowest {readable(float(gaps.max()))}), {readable(seconds)} in all",
                figures={"tokens_per_s": rate, "per_token_s": float(np.median(gaps))},
            )
        )
        whole = all(len(times) == tokens for times in found)
        transports = {each["transport"] for each in _handoffs(await client.status(handoffs=64))}
        wanted = "cuda_ipc" if stage.cupy is not None else "shm"
        result = f"{', '.join(sorted(transports))}, {'all' if whole else 'not all'} tokens"
        right = whole and transports == {wanted}
        lines.append(checked("every request is complete", right, result, wanted))
    return lines


def _handoffs(status: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = status["handoffs"]["last"]
    return found


async def _one(client: AsyncClient, prompt: list[int], count: int) -> list[float]:
    """Seconds from the call to each of ``count`` tokens."""
    params = SamplingParams(
        temperature=0.8, top_p=0.95, seed=1, max_new_tokens=count, ignore_eos=True
    )
    began, times = time.perf_counter(), []
    async for output in client.generate(prompt, params):
        times += [time.perf_counter() - began] * len(output.tokens)
    return times


def _first_token(length: int, firsts: list[float]) -> Line:
    median = statistics.median(firsts)
    words = f"{readable(median)} ({readable(min(firsts))} to {readable(max(firsts))})"
    figures = {"seconds": median, "tokens_per_s": length / median}
    return Line(f"first token after a prompt of {length}", words, figures=figures)


def _handoff(length: int, status: Any, longest: bool) -> Line:
    """From the first token, at the prefill worker, to the request at the decode worker."""
    tried = [request["attempts"][-1] for request in status["requests"] if request["attempts"]]
    tried = [each for each in tried if each["handoff"] and each["decode_times"]]
    seconds = statistics.median(
        each["decode_times"]["taken_over_s"] - each["prefill_times"]["computed_s"] for each in tried
    )
    nbytes = tried[0]["handoff"]["bytes_received"]
    frames = tried[0]["handoff"]["frames"]
    words = f"{readable(seconds)} after the prompt, {nbytes >> 20} MiB in {frames} frames"
    figures = {"seconds": seconds, "bytes": float(nbytes)}
    what = f"handoff of {length} tokens"
    if not longest:
        return Line(what, words, figures=figures)
    return measured(what, words, readable(HANDOFF_BAR_S), seconds <= HANDOFF_BAR_S, **figures)
