"""A prefill and a decode worker on one GPU, which serve a model through router and client.

The model has the shapes of Llama-3.1-8B; both workers load it: 2 x 16 GB, and 8 GiB of KV each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np

from baton.client import AsyncClient
from baton.proto.sampling import SamplingParams

from ..cluster import threads_of
from ..served import Served
from .lines import Line, checked, measured, wrong
from .models import checkpoint
from .serving import first_error
from .stage import Stage, Timing, readable

HANDOFF_BAR_S, CPU_BAR_S = 2e-3, 5e-3
"""Bars for 8,192 tokens (1 GiB): seconds after the prompt, and CPU seconds of both workers."""
STREAMS = 64
_REPORT_S = 0.5
"""Seconds after which workers have reported their load and their handoffs."""
_FREE_S = 10.0
_READY_S = 75.0
"""Below the time limit of this part, so that its log shows why a cluster is not ready."""
_LOADED = re.compile(r"(\S+) loaded ")


def cluster(stage: Stage) -> Iterator[Line]:
    """Measure first tokens, handoffs, one stream and many; check that all blocks are freed."""
    folder = checkpoint(stage)
    log = stage.scratch / "serve.log"
    say = _Progress(log)
    try:
        yield from _served(stage, folder, say)
    finally:
        say("the end")
    error = first_error(log)
    yield checked("no error in the cluster's log", not error, error or "none")


def _served(stage: Stage, folder: Path, say: _Progress) -> Iterator[Line]:
    longest = stage.size(8192, 40)
    size = "--kv-blocks=64" if stage.tiny else "--kv-memory=8GiB"
    flags = (
        *stage.flags, size, f"--max-num-seqs={STREAMS}", f"--prefill-max-num-seqs={STREAMS}",
        # A prompt is one chunk, however long its step takes.
        f"--max-num-batched-tokens={longest}", "--step-time=0",
        "--log-level=debug", "--log-format=json",
    )  # fmt: skip
    say(f"baton serve {' '.join(flags)}")
    began = time.monotonic()
    with Served(stage.scratch, folder, flags=flags, ready_s=_READY_S) as served:
        seconds = time.monotonic() - began
        say("ready")
        steps = _steps(served.log, time.time() - seconds)
        words = [readable(seconds), *(f"{name} after {at:.1f} s" for name, at in steps.items())]
        yield Line("cluster ready", ", ".join(words), figures={"seconds": seconds})
        with _Load(stage, served, say) as load:
            try:
                for length in (stage.size(512, 16), stage.size(2048, 24), longest):
                    yield from load.prompts(length, last=length == longest)
                yield load.one_stream()
                yield load.many_streams()
                yield from load.ended()
            except BaseException as error:  # this process may be killed before the cluster ends
                say(f"interrupted: {error!r}")
                raise


def _steps(log: Path, began: float) -> dict[str, float]:
    """Return the seconds from ``began`` until each worker had loaded, and until it was ready."""
    found = {}
    for line in log.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
            at = datetime.fromisoformat(entry["timestamp"]).timestamp() - began
        except (ValueError, TypeError, KeyError):  # a warning, or cut off
            continue
        if loaded := _LOADED.match(entry["event"]):
            found[f"{loaded[1]} loaded"] = at
        elif entry["event"] == "worker.ready":
            found[f"{entry['process']} ready"] = at
    return found


class _Progress:
    """Prints each step with the seconds since the start, after the new lines of the cluster's log.

    Log lines of finished requests and of frames are left out.
    """

    def __init__(self, log: Path) -> None:
        self._began, self._log, self._shown = time.monotonic(), log, 0

    def __call__(self, text: str) -> None:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        for line in lines[self._shown :]:
            if '"outcome":"finished"' not in line and '"frame":' not in line:
                print(f"           | {line}")
        self._shown = len(lines)
        print(f"{time.monotonic() - self._began:7.2f} s  {text}", flush=True)


@dataclass(frozen=True)
class _Spent:
    """CPU seconds of each worker's thread with the sockets, and of all threads together."""

    prefill: float
    decode: float
    total: float

    def since(self, before: _Spent) -> _Spent:
        """Return the CPU seconds spent since ``before``."""
        return _Spent(
            self.prefill - before.prefill, self.decode - before.decode, self.total - before.total
        )


class _Load:
    """Sends requests to a cluster. Each measurement is a call, so its lines are shown at once."""

    def __init__(self, stage: Stage, served: Served, say: _Progress) -> None:
        self._stage, self._say, self._log = stage, say, served.log
        self._rng = np.random.default_rng(13)
        self._vocab = served.client.describe().card.vocab_size
        workers = served.client.status()["workers"]
        self._pids = {worker["role"]: int(worker["pid"]) for worker in workers}
        self._runner = asyncio.Runner()
        self._client = AsyncClient(served.address)
        self._whole, self._requests = True, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._client.close())
        self._runner.close()

    def prompts(self, length: int, *, last: bool) -> Iterator[Line]:
        """Measure prompts one at a time. ``last``: the longest prompts, which have bars."""
        firsts, seconds, spent = [], [], []
        for turn in range(self._stage.size(7, 2)):
            before = self._spent()
            times = self._run(self._one(self._prompt(length), 2))
            self._say(f"prompt of {length}: {', '.join(readable(each) for each in times)}")
            self._rest(0.1)
            if turn:  # the first one compiles
                firsts.append(times[0])
                seconds.append(times[1] - times[0])
                spent.append(self._spent().since(before))
        self._rest(_REPORT_S)
        stories = self._status(requests=len(firsts))["requests"]
        attempts = [attempt for story in stories for attempt in story["attempts"][-1:]]
        attempts = [each for each in attempts if each["handoff"] and each["decode_times"]]
        if not attempts:
            yield wrong(f"prompts of {length}", f"{len(stories)} requests, no handoff")
            return
        first = Timing.of(firsts)
        inside = _median(_between(each, "received_s", "computed_s") for each in attempts)
        then = statistics.median(seconds)
        yield Line(
            f"first token after a prompt of {length}",
            f"{first.text}, {readable(inside)} of it at the prefill worker; "
            f"the second {readable(then)} later",
            figures={
                "seconds": first.median, "worker_seconds": inside, "second_token_seconds": then,
                "tokens_per_s": length / first.median,
            },
        )  # fmt: skip
        yield _handoff(length, attempts, first.median, last=last)
        yield frames_of_the_last(length, self._log.read_text(errors="replace").splitlines())
        yield _processors(length, spent, last=last)

    def one_stream(self) -> Line:
        """Measure the time between the tokens of a request alone."""
        tokens, gaps, span = self._stage.size(128, 6), [], 0.0
        computed = self._computed()
        for _ in range(self._stage.size(3, 1)):
            times = self._run(self._one(self._prompt(self._stage.size(512, 16)), tokens))
            gaps += np.diff(times[2:]).tolist()
            span += times[-1] - times[0]
            self._say(f"one stream: {tokens} tokens in {readable(times[-1])}")
        share = (self._computed() - computed) / span
        median, slow = statistics.median(gaps), float(np.quantile(gaps, 0.99))
        return Line(
            "one stream",
            f"{1 / median:.0f} tok/s, {readable(median)} between tokens (p99 {readable(slow)}), "
            f"the decode worker computes {share:.0%} of the time",
            figures={"seconds": median, "p99_seconds": slow, "step_share": share},
        )

    def many_streams(self) -> Line:
        """Measure requests that begin together, after a first round, which captures graphs."""
        streams, tokens = self._stage.size(STREAMS, 3), self._stage.size(128, 6)
        rates, firsts, per_token, span, computed = [], [], [], 0.0, 0.0
        for turn in range(self._stage.size(4, 2)):
            prompts = [self._prompt(self._stage.size(512, 16)) for _ in range(streams)]
            before = self._computed()
            began = time.perf_counter()
            found = self._run(self._all(prompts, tokens))
            seconds = time.perf_counter() - began
            self._say(f"{streams} streams of {tokens} tokens in {readable(seconds)}")
            if turn:
                rates.append(streams * tokens / seconds)
                firsts += [times[0] for times in found]
                per_token += [(times[-1] - times[0]) / (tokens - 1) for times in found]
                span += max(times[-1] for times in found) - min(times[0] for times in found)
                computed += self._computed() - before
        rate, first = statistics.median(rates), statistics.median(firsts)
        median, slow = statistics.median(per_token), float(np.quantile(per_token, 0.99))
        return Line(
            f"{streams} streams, {tokens} tokens each",
            f"{rate:.0f} tok/s; first token {readable(first)}; TPOT {readable(median)} "
            f"(p99 {readable(slow)}), the decode worker computes {computed / span:.0%} of the time",
            figures={
                "tokens_per_s": rate, "first_seconds": first, "per_token_s": median,
                "p99_per_token_s": slow, "step_share": computed / span,
            },
        )  # fmt: skip

    def ended(self) -> Iterator[Line]:
        """Check that all requests were served over one transport, and that all blocks are free."""
        status = self._status(handoffs=255)
        counts, handoffs = status["router"]["requests"], status["handoffs"]["last"]
        other = ("failed", "cancelled", "disconnected", "refused", "moved")
        others = {name: counts[name] for name in other}
        right = self._whole and counts["finished"] == self._requests and not any(others.values())
        result = f"{counts['finished']} of {self._requests}, {'all' if self._whole else 'not all'}"
        rest = "".join(f", {count} {name}" for name, count in others.items() if count)
        yield checked("requests finished", right, f"{result} with all tokens{rest}")
        names = sorted({each["transport"] for each in handoffs})
        wanted = "cuda_ipc" if self._stage.cupy is not None else "shm"
        again = sum(each["resent_frames"] for each in handoffs)
        result = f"{', '.join(names)} for {len(handoffs)} handoffs, {again} frames sent again"
        yield checked("how blocks travelled", names == [wanted], result, wanted)
        until = time.monotonic() + _FREE_S
        while (used := self._used()) and time.monotonic() < until:
            self._rest(0.1)
        total = sum(worker["kv_blocks_total"] for worker in self._status()["workers"])
        yield checked("blocks given back", not used, f"{used} of {total} still held")

    # ------------------------------------------------------------------ requests

    def _prompt(self, length: int) -> list[int]:
        found: list[int] = self._rng.integers(0, self._vocab, length).tolist()
        return found

    async def _one(self, prompt: list[int], count: int) -> list[float]:
        """Return the seconds from the call to each of ``count`` tokens."""
        params = SamplingParams(
            temperature=0.8, top_p=0.95, seed=1, max_new_tokens=count, ignore_eos=True
        )
        self._requests += 1
        began, times = time.perf_counter(), list[float]()
        async for output in self._client.generate(prompt, params):
            times += [time.perf_counter() - began] * len(output.tokens)
        self._whole &= len(times) == count
        return times

    async def _all(self, prompts: Sequence[list[int]], count: int) -> list[list[float]]:
        return await asyncio.gather(*(self._one(prompt, count) for prompt in prompts))

    # ------------------------------------------------------------------ the cluster's reports

    def _run(self, work: Awaitable[Any]) -> Any:
        async def waited() -> Any:
            return await work

        return self._runner.run(waited())

    def _rest(self, seconds: float) -> None:
        self._run(asyncio.sleep(seconds))

    def _status(self, *, requests: int = 0, handoffs: int = 0) -> Any:
        return self._run(self._client.status(requests=requests, handoffs=handoffs))

    def _used(self) -> int:
        """Return the number of blocks that requests hold at both workers."""
        return sum(worker["kv_blocks_used"] for worker in self._status()["workers"])

    def _computed(self) -> float:
        """Return the seconds that the decode worker has spent in steps."""
        self._rest(_REPORT_S)
        workers = self._status()["workers"]
        return float(sum(w["compute_seconds"] for w in workers if w["role"] == "decode"))

    def _spent(self) -> _Spent:
        total, sockets = 0, {}
        for role, pid in self._pids.items():
            threads = threads_of(pid)
            sockets[role] = threads[str(pid)].ran * 1e-9  # the first thread has the sockets
            total += sum(thread.ran for thread in threads.values())
        return _Spent(sockets["prefill"], sockets["decode"], total * 1e-9)


def _between(attempt: dict[str, Any], start: str, end: str) -> float:
    """Return the seconds between two steps of an attempt at its prefill worker."""
    times = attempt["prefill_times"]
    return float(times[end] - times[start])


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


def _handoff(length: int, attempts: Sequence[dict[str, Any]], first: float, *, last: bool) -> Line:
    """Return the time from the first token until the decode worker has the request.

    The rate is all bytes divided by this time, although the first frames are sent before it begins.
    """
    seconds = _median(
        each["decode_times"]["taken_over_s"] - each["prefill_times"]["computed_s"]
        for each in attempts
    )
    ahead = _median(_between(each, "sending_s", "computed_s") for each in attempts)
    handoff = attempts[0]["handoff"]
    nbytes, frames = handoff["bytes_received"], handoff["frames"]
    rate = nbytes / seconds
    words = (
        f"{readable(seconds)} after the prompt ({seconds / first:.1%} of the first token's time), "
        f"{nbytes / 2**20:.0f} MiB in {frames} frames, {rate / 1e9:.0f} GB/s; "
        f"the first frame {_signed(-ahead)}"
    )
    figures = {
        "seconds": seconds, "bytes": float(nbytes), "bytes_per_s": rate, "frames": float(frames),
        "first_frame_ahead_s": ahead, "share": seconds / first,
    }  # fmt: skip
    what = f"handoff of {length} tokens"
    if not last:
        return Line(what, words, figures=figures)
    return measured(what, words, readable(HANDOFF_BAR_S), seconds <= HANDOFF_BAR_S, **figures)


def frames_of_the_last(length: int, log: Sequence[str]) -> Line:
    """Return the times from packing and storing each frame until the last frame was stored.

    Both workers log these events of the last handoff. They show which step after the last layer is
    slow.
    """
    entries = list[dict[str, Any]]()
    for text in log:
        if '"frame":' in text:
            with contextlib.suppress(ValueError):  # cut off
                entries.append(json.loads(text))
    packed, stored = dict[int, float](), dict[int, tuple[float, int, float]]()
    for entry in sorted(entries, key=itemgetter("timestamp")):  # processes log in any order
        at, frame = datetime.fromisoformat(entry["timestamp"]).timestamp(), int(entry["frame"])
        if entry["event"] == "frame.packed":
            if frame == 0:
                packed, stored = {}, {}
            packed[frame] = at
        elif entry["event"] == "frame.stored":
            stored[frame] = (at, entry["layers"], entry["seconds"])
    what = f"frames of the last prompt of {length}"
    if not stored or packed.keys() != stored.keys():
        return wrong(what, f"{len(packed)} packed, {len(stored)} stored")
    end = max(at for at, _, _ in stored.values())
    words = [
        f"{layers} layers: packed {readable(end - packed[frame])}, stored "
        f"{readable(end - at)} before the last, {readable(took)} from its arrival"
        for frame, (at, layers, took) in sorted(stored.items())
    ]
    figures = {f"packed_{i}": end - at for i, at in packed.items()}
    figures |= {f"stored_{i}": end - at for i, (at, _, _) in stored.items()}
    return Line(what, "; ".join(words), figures=figures)


def _signed(seconds: float) -> str:
    return f"{readable(abs(seconds))} {'after' if seconds > 0 else 'before'} its end"


def _processors(length: int, spent: Sequence[_Spent], *, last: bool) -> Line:
    """Return the CPU time of a request in the threads with the sockets, which start the copies.

    The other threads launch the model's kernels and wait for the GPU.
    """
    prefill = statistics.median(each.prefill for each in spent)
    decode = statistics.median(each.decode for each in spent)
    total = statistics.median(each.total for each in spent)
    words = (
        f"{readable(prefill)} at the prefill worker, {readable(decode)} at the decode worker; "
        f"{readable(total)} with the threads that compute"
    )
    figures = {"prefill_seconds": prefill, "decode_seconds": decode, "all_seconds": total}
    what = f"CPU of a request of {length} tokens"
    if not last:
        return Line(what, words, figures=figures)
    both = prefill + decode
    return measured(what, words, readable(CPU_BAR_S), both <= CPU_BAR_S, **figures)
