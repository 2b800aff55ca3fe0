"""How long the KV blocks of a cancelled request stay taken, beside the length of a step.

A real cluster, one prefill and two decode processes; every moment is a timestamp taken inside
the process that reaches it: the client sends the Cancel, the router reads it, the worker reads
the Abort, the scheduler has freed the blocks, on the later of the two workers. Three ways to
end: one cancel at a time with nothing beside it, clients that are killed, and a storm of random
cancels beside streams that run to their end, which is more work than the machine has cores for.

The limit is a layer of a step whose requests have all left, and a whole step if another request
needs the step: until then its blocks stay taken. Exit code 1: a p99 missed the bar.

    python -m baton.benchmarks.cancel [--models NAME ...] [--storm 1000]

NAME: ``embedded``, a folder, or a random model: m25-F32, m25-BF16, m125-F32, m125-BF16.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import numpy as np
import zmq

from baton.proto.ids import request_key
from baton.proto.layout import ModelCard
from baton.proto.wire.messages import (
    Cancel,
    FinalAck,
    Submit,
    Terminal,
    Tokens,
)
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.runtime.process.os_settings import limit_blas_threads

from .checkpoints import SHAPES, write_checkpoint
from .scratch import scratch_folder
from .served import Peer, Served, served_card

BAR_MS = 100
WIDTH = 16
PROMPT, ENDLESS, SURVIVING = (200, 400), 1500, 80
DOOMED = 8
SETTLE_S = 30.0
EMBEDDED = "embedded"
RANDOM = [f"{shape}-{dtype}" for shape in SHAPES for dtype in ("F32", "BF16")]


@dataclass
class Running:
    """A request, with the time or the number of tokens after which it is cancelled, if any."""

    number: int
    name: str
    key: bytes
    new: int
    cancel_at: float = float("inf")
    cancel_tokens: int = 1 << 30
    tokens: int = 0
    heard: float = 0.0  # when its last tokens arrived


Choice = Callable[[], Running | None]


class Load:
    """Requests of one connection. When a request ends, ``choose`` returns the next request.

    ``sent``: when each Cancel was sent, by request key; ``gaps``: seconds between the tokens of
    the requests that run to their end.
    """

    def __init__(self, peer: Peer, card: ModelCard, seed: int) -> None:
        self.sent: dict[str, float] = {}
        self.gaps: list[float] = []
        self.choose: Choice = lambda: None
        self._peer = peer
        self._card = card
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._running: dict[bytes, Running] = {}
        self._due: list[tuple[float, int, bytes]] = []

    @property
    def busy(self) -> bool:
        """Whether anything runs."""
        return bool(self._running)

    @property
    def due(self) -> float:
        """Time of the next cancel."""
        return self._due[0][0] if self._due else float("inf")

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """To be polled."""
        return self._peer.socket

    def new(self, tokens: int) -> Running:
        """A request that runs to its end."""
        number = next(self._numbers)
        name = f"{number}"
        return Running(number, name, request_key(self._peer.identity, name), tokens)

    def doomed(self, delay: float, tokens: int) -> Running:
        """A request that is cancelled ``delay`` s from now, or when it has so many tokens."""
        request = self.new(ENDLESS)
        request.cancel_at, request.cancel_tokens = time.monotonic() + delay, tokens
        return request

    def begin(self, count: int) -> None:
        """Start so many."""
        for _ in range(count):
            request = self.choose()
            if request is None:
                return
            self._running[request.key] = request
            heapq.heappush(self._due, (request.cancel_at, request.number, request.key))
            self._peer.say(Submit(request_id=request.name, context=self._context(request)))

    def turn(self) -> None:
        """Read the arrived messages, and send the due cancels."""
        for message in self._peer.read():
            if isinstance(message, Tokens):
                self._heard(message)
            elif isinstance(message, Terminal):
                self._peer.say(FinalAck(requests=[message.request]))
                if self._running.pop(message.request, None) is not None:
                    self.begin(1)
        while self._due and self._due[0][0] <= time.monotonic():
            self._cancel(heapq.heappop(self._due)[2])

    def _heard(self, message: Tokens) -> None:
        now = time.monotonic()
        for run in message.runs:
            request = self._running.get(run.request)
            if request is None:
                continue
            if request.heard and request.new == SURVIVING:
                self.gaps.append(now - request.heard)
            request.heard = now
            request.tokens += len(run.tokens)
            if request.tokens >= request.cancel_tokens:
                self._cancel(request.key)

    def _cancel(self, key: bytes) -> None:
        request = self._running.get(key)
        if request is None or key.hex() in self.sent or request.cancel_tokens == 1 << 30:
            return
        self.sent[key.hex()] = time.monotonic()
        self._peer.say(Cancel(request_id=request.name, request=key))

    def _context(self, request: Running) -> WireContext:
        length = self._rng.randint(*PROMPT)
        tokens = [self._rng.randrange(4, self._card.vocab_size) for _ in range(length)]
        return WireContext(
            tokens=WireTokens(np.array(tokens, np.int32)),
            max_length=length + request.new,
            sampling=WireSampling(
                temperature=0.8, max_new_tokens=request.new, ignore_eos=True, seed=request.number
            ),
            eos_token_ids=self._card.eos_token_ids,
            ignore_eos=True,
        )


def pump(*loads: Load) -> None:
    """Go on until nothing runs."""
    poller = zmq.Poller()
    for load in loads:
        poller.register(load.socket, zmq.POLLIN)
    while any(load.busy for load in loads):
        wait = min(load.due for load in loads) - time.monotonic()
        poller.poll(max(0, min(100, int(wait * 1000) + 1)) if wait < 1 else 100)
        for load in loads:
            load.turn()


# ---------------------------------------------------------------------------------- timestamps


@dataclass
class Moments:
    """When one cancel was where: monotonic seconds, the same clock in every process."""

    sent: float = 0.0
    router: float = 0.0
    workers: list[tuple[float, float]] = field(default_factory=list)  # Abort read, blocks free

    @property
    def last(self) -> tuple[float, float]:
        """Of the worker that was the last to free its blocks."""
        return max(self.workers, key=lambda pair: pair[1])

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """Milliseconds: all, to the router, to the worker, to the end of its step."""
        heard, free = self.last
        times = free - self.sent, self.router - self.sent, heard - self.router, free - heard
        return tuple(1e3 * t for t in times)  # type: ignore[return-value]


def read_log(log: Path, sent: dict[str, float]) -> list[Moments]:
    """The cancels of ``sent`` (when, by key) that met a running request."""
    found: dict[str, Moments] = {}
    for line in log.read_text(errors="replace").splitlines():
        _, _, event = line.partition(": info: ")
        name, *pairs = event.split(" ")
        fields = dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
        key = fields.get("request", "")
        if key not in sent:
            continue
        moments = found.setdefault(key, Moments(sent[key]))
        if name == "request.cancelled":
            moments.router = float(fields["at"])
        elif name == "request.freed":
            moments.workers.append((float(fields["heard"]), float(fields["at"])))
    return [each for each in found.values() if each.router]


def settled(log: Path, sent: dict[str, float]) -> list[Moments]:
    """As :func:`read_log`, once every cancel the router saw is answered by a worker."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        time.sleep(0.3)
        moments = read_log(log, sent)
        if all(len(each.workers) >= 1 for each in moments):
            return moments
    raise RuntimeError("blocks of a cancelled request were never freed")


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(what: str, moments: list[Moments], gaps: list[float] | None = None) -> bool:
    """One line of the table; whether it is within the bar."""
    columns = list(zip(*(each.parts for each in moments), strict=True))
    total = list(columns[0])
    p50, p99 = percentile(total, 0.5), percentile(total, 0.99)
    parts = "  ".join(f"{percentile(list(c), 0.99):6.1f}" for c in columns[1:])
    step = ""
    if gaps:
        step = f"   {1e3 * percentile(gaps, 0.5):5.1f} {1e3 * percentile(gaps, 0.99):6.1f}"
    line = f"{what:14s} {len(moments):5d} {p50:8.1f} {p99:8.1f} {max(total):8.1f}     {parts}"
    print(line + step + ("" if p99 <= BAR_MS else "  MISSED"), flush=True)
    return p99 <= BAR_MS


# ---------------------------------------------------------------------------------- scenarios


def lone_cancels(served: Served, card: ModelCard, count: int) -> bool:
    """One request at a time, nothing beside it."""
    load, rng, left = Load(Peer(served.address, "lone"), card, 1), random.Random(1), count

    def choose() -> Running | None:
        nonlocal left
        left -= 1
        return load.doomed(rng.random() * 0.1, 1 << 20) if left >= 0 else None

    load.choose = choose
    load.begin(1)
    pump(load)
    return show("lone cancel", settled(served.log, load.sent))


def client_deaths(served: Served, count: int) -> bool:
    """Clients with eight requests each, some of them streaming, killed with SIGKILL."""
    sent: dict[str, float] = {}
    for number in range(count):
        name = f"doomed-{number}"
        command = [sys.executable, "-P", "-m", "baton.benchmarks.cancel", "--doomed"]
        client = subprocess.Popen([*command, served.address, name], stdout=subprocess.PIPE)
        with client, cast("IO[bytes]", client.stdout) as said:
            said.readline()
            at = time.monotonic()
            client.kill()
        keys = [request_key(name.encode(), str(each)).hex() for each in range(DOOMED)]
        sent |= dict.fromkeys(keys, at)
    return show("client killed", settled(served.log, sent))


def run_doomed(address: str, name: str) -> None:
    """The client to kill. It reports when half of its requests stream."""
    peer = Peer(address, name)
    load = Load(peer, served_card(address), 2)
    load.choose = lambda: load.new(ENDLESS)
    load.begin(DOOMED)
    streaming: set[bytes] = set()
    while True:
        peer.socket.poll(1000)
        for message in peer.read():
            if isinstance(message, Tokens):
                streaming |= {run.request for run in message.runs}
        if len(streaming) >= DOOMED // 2:
            print("running", flush=True)
            time.sleep(60)
            return


def storm(served: Served, card: ModelCard, count: int) -> bool:
    """Random cancels, sixteen at a time, beside sixteen streams that run to their end."""
    cancelled = Load(Peer(served.address, "storm"), card, 3)
    others = Load(Peer(served.address, "others"), card, 4)
    rng, left = random.Random(5), count

    def choose() -> Running | None:
        nonlocal left
        left -= 1
        if left < 0:
            return None
        return cancelled.doomed(rng.random() * 0.25, rng.choice([1, 30, 2000]))

    cancelled.choose = choose
    others.choose = lambda: others.new(SURVIVING) if cancelled.busy else None
    cancelled.begin(WIDTH)
    others.begin(WIDTH)
    pump(cancelled, others)
    return show("storm", settled(served.log, cancelled.sent), others.gaps)


def measure(model: Path | None, scratch: Path, options: argparse.Namespace) -> bool:
    """The three ways of one model; whether all were within the bar."""
    flags = ("--log-level=info", "--kv-memory=64MiB")
    cancels = options.storm or (1000 if model is None else 100)
    with Served(scratch, model, decode=2, flags=flags) as served:
        card = served_card(served.address)
        within = [
            lone_cancels(served, card, options.lone),
            client_deaths(served, options.clients),
            storm(served, card, cancels),
        ]
    return all(within)


def folder_of(name: str, scratch: Path) -> Path | None:
    """Where a model is; a random one is written."""
    if name == EMBEDDED:
        return None
    if name not in RANDOM:
        return Path(name)
    shape, dtype = name.split("-")
    return write_checkpoint(scratch / name, SHAPES[shape], dtype)


def main() -> int:
    """Print the tables. The exit code is 0 if the bar was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[EMBEDDED, *RANDOM], metavar="NAME")
    parser.add_argument("--lone", type=int, default=100)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--storm", type=int, help="[1000; with a larger model 100]")
    parser.add_argument("--doomed", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.doomed:
        run_doomed(*options.doomed)
        return 0
    limit_blas_threads(1)
    print(f"ms until the blocks are free; bar: p99 {BAR_MS}; limit: a layer, or a step that others")
    print("wait for" + " " * 37 + "p99 of its parts: to the" + " " * 9 + "tokens of a")
    print(" " * 45 + "router  worker    step   stream apart")
    print(f"{'':14s} count      p50      p99      max" + " " * 30 + "p50    p99")
    within = []
    for name in options.models:
        print(name)
        with scratch_folder() as scratch:
            within.append(measure(folder_of(name, scratch), scratch, options))
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
