"""First tokens in bursts that are more than the prefill pool can do, by the order of prompts.

A real cluster, one prefill and one decode process. How long a prompt takes alone is measured
first. Then bursts: for the time of BURST prompts, OVERLOAD times as many come as can be computed,
each with the same limit for its first token; then quiet until all are answered. The same bursts
go to two clusters: the first begins prompts in the order of arrival, the second begins prompts that
can still be in time. The limit is what any order could keep: what can be computed,
as fast as in these bursts, from the first arrival to the last moment that is in time.

    python -m baton.benchmarks.burst [--model m25] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from baton.proto.ids import request_key
from baton.proto.layout import ModelCard
from baton.proto.wire.messages import FinalAck, Submit, Terminal, Tokens
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.runtime.process.os_settings import limit_blas_threads

from .checkpoints import SHAPES, write_checkpoint
from .scratch import scratch_folder
from .served import Peer, Served, served_card

PROMPT = 256
BURST, OVERLOAD, LIMIT = 24, 2.0, 8.0
"""A burst lasts so many prompts' time and brings so many times their number; a first token is in
time within so many prompts' time."""
ORDERS = ("fcfs", "edf")
FALLS_SHORT = 0.7
"""Of what any order could keep, the least that ``edf`` must."""
HANGS_S = 60.0


@dataclass
class Side:
    """One cluster, and the seconds to the first token of every prompt of its bursts."""

    order: str
    served: Served
    peer: Peer
    card: ModelCard
    waits: list[float]
    spans: list[float] = field(default_factory=list)
    """Seconds from the first prompt of each burst to the last one's first token."""

    def ask(self, rng: np.random.Generator, at: list[float]) -> list[float]:
        """Send a prompt at each of these seconds from now; seconds to each first token."""
        start, number = time.monotonic(), len(self.waits)
        asked: dict[bytes, float] = {}
        first: dict[bytes, float] = {}
        ended = 0
        while ended < len(at):
            now = time.monotonic() - start
            while len(asked) < len(at) and at[len(asked)] <= now:
                name = f"{number + len(asked)}-{start}"
                asked[request_key(self.peer.identity, name)] = start + at[len(asked)]
                self.peer.say(Submit(request_id=name, context=self._context(rng)))
            left = at[len(asked)] - now if len(asked) < len(at) else 1.0
            self.peer.socket.poll(max(0, int(1e3 * left)))
            for message in self.peer.read():
                if isinstance(message, Tokens):
                    for run in message.runs:
                        first.setdefault(run.request, time.monotonic())
                elif isinstance(message, Terminal):
                    self.peer.say(FinalAck(requests=[message.request]))
                    ended += 1
                    if message.code:
                        raise RuntimeError(f"{self.order}: {message.code}: {message.message}")
            if now > HANGS_S + at[-1]:
                raise RuntimeError(f"{self.order}: {len(at) - ended} prompts are not answered")
        self.spans.append(max(first.values()) - start - at[0])
        return [first[key] - came for key, came in asked.items()]

    def _context(self, rng: np.random.Generator) -> WireContext:
        return WireContext(
            tokens=WireTokens(rng.integers(4, self.card.vocab_size, PROMPT, np.int32)),
            max_length=PROMPT + 2,
            sampling=WireSampling(temperature=0.0, max_new_tokens=2, ignore_eos=True),
            eos_token_ids=self.card.eos_token_ids,
            ignore_eos=True,
        )


def side(folder: Path, model: Path, order: str, limit: float) -> Side:
    """A cluster with this order, warm."""
    scratch = folder / f"{order}-{limit:.3f}"
    scratch.mkdir()
    flags = (f"--prefill-order={order}", f"--slo-ttft={limit}")
    served = Served(scratch, model, flags=flags)
    made = Side(order, served, Peer(served.address, "burst"), served_card(served.address), [])
    rng = np.random.default_rng(1)
    for _ in range(8):
        made.ask(rng, [0.0])
    made.spans.clear()
    return made


def alone(made: Side) -> float:
    """Median seconds of a prompt that comes when another ends."""
    rng = np.random.default_rng(2)
    waits = made.ask(rng, [0.0] * 16)
    made.spans.clear()
    return max(waits) / len(waits)


def burst(rng: np.random.Generator, own: float) -> list[float]:
    """Seconds at which the prompts of a burst come."""
    count = round(BURST * OVERLOAD)
    return sorted(rng.uniform(0, BURST * own, count).tolist())


def possible(own: float, sides: list[Side]) -> float:
    """Share of a burst that can be computed by the time its last prompt would be late."""
    spans = [span for each in sides for span in each.spans]
    return min(1.0, (BURST + LIMIT) * own / statistics.median(spans))


def main() -> int:
    """Print the table; 0 when the order that keeps the limit does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="m25", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    limit_blas_threads()
    with scratch_folder() as folder:
        model = write_checkpoint(folder / options.model, SHAPES[options.model], "F32")
        trial = side(folder, model, "fcfs", 1.0)
        own = alone(trial)
        trial.served.close()
        limit = LIMIT * own
        sides = [side(folder, model, order, limit) for order in ORDERS]
        try:
            for number in range(options.rounds):
                for each in sides if number % 2 else sides[::-1]:
                    rng = np.random.default_rng(number)
                    each.waits += each.ask(rng, burst(rng, own))
        finally:
            for each in sides:
                each.served.close()
    return show(sides, own, limit)


def show(sides: list[Side], own: float, limit: float) -> int:
    """One line per order."""
    print(
        f"prompts of {PROMPT} tokens take {1e3 * own:.1f} ms; first tokens in {1e3 * limit:.0f} ms"
    )
    most = possible(own, sides)
    print(f"{'order':10}{'in time':>9}{'of possible':>13}{'p50 s':>8}{'worst s':>9}")
    shares = {}
    for each in sides:
        share = shares[each.order] = sum(wait <= limit for wait in each.waits) / len(each.waits)
        p50, worst = statistics.median(each.waits), max(each.waits)
        print(f"{each.order:10}{share:9.1%}{share / most:13.2f}{p50:8.2f}{worst:9.2f}")
    held = shares["edf"] >= max(FALLS_SHORT * most, shares["fcfs"])
    print(
        f"any order: {most:.1%} at most; limit: edf >= {FALLS_SHORT} of it: "
        f"{'held' if held else 'MISSED'}"
    )
    return int(not held)


if __name__ == "__main__":
    raise SystemExit(main())
