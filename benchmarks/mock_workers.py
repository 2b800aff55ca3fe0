"""A prefill and a decode worker that speak the protocol and compute nothing.

Every step of ``step_s`` seconds gives each running request one token. With ``slots``, so many
requests run at a time, the oldest first.

    python -m baton.benchmarks.mock_workers --address ROUTER --step-ms 2 [--slots 16]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from itertools import islice

import msgspec
import zmq

from baton.proto.wire.messages import (
    Abort,
    Aborted,
    Accepted,
    Assign,
    HandoffReport,
    Heartbeat,
    Terminal,
    TokenRun,
    Tokens,
)

from .synthetic import CARD, Link, worker_link

_TOKEN = 400  # of the embedded model's vocabulary; a part of a word
_HEARTBEAT_S = 0.2


@dataclass(slots=True)
class _Running:
    key: bytes
    attempt: int
    position: int
    end: int


class Workers:
    """Both workers and the requests that they generate for."""

    def __init__(self, address: str, step_s: float, slots: int = 0) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        card = msgspec.structs.replace(CARD, vocab_size=1024, max_length=2048)
        self.prefill = worker_link(context, address, "prefill", 0, card)
        self.decode = worker_link(context, address, "decode", 0, card, slots)
        self._slots = slots or None
        self._running: dict[bytes, _Running] = {}
        self._step_s = step_s
        self._beat_at = self._step_at = 0.0

    def run(self) -> None:
        """Serve until the process ends."""
        poller = zmq.Poller()
        for link in (self.prefill, self.decode):
            poller.register(link.socket, zmq.POLLIN)
        while True:
            now = time.monotonic()
            if now >= self._beat_at:
                self._beat_at = now + _HEARTBEAT_S
                for incarnation, link in ((1, self.prefill), (3, self.decode)):
                    link.out.append(Heartbeat(incarnation=incarnation, progress=0))
            for link in (self.prefill, self.decode):
                self._read(link)
            if self._running and now >= self._step_at:
                self._step_at = now + self._step_s
                self._step()
            self.prefill.flush()
            self.decode.flush()
            due = min(self._beat_at, self._step_at if self._running else self._beat_at)
            poller.poll(max(0, math.ceil((due - time.monotonic()) * 1000)))

    def _read(self, link: Link) -> None:
        for message in link.read():
            if type(message) is Assign:
                self._begin(message)
            elif type(message) is Abort:
                self._running.pop(message.request, None)
                link.out.append(Aborted(request=message.request, attempt=message.attempt))

    def _begin(self, assign: Assign) -> None:
        context, key, attempt = assign.context, assign.request, assign.attempt
        length = len(context.tokens.array)
        first = TokenRun(key, attempt, length, [_TOKEN])
        report = HandoffReport(
            request=key, attempt=attempt, prefill="prefill-0", decode="decode-0", transport="zmq",
            bytes_sent=1, bytes_received=1, blocks=2, cached_tokens=0,
        )  # fmt: skip
        accepted = Accepted(request=key, attempt=attempt)
        self.prefill.out += [accepted, Tokens(runs=[first])]
        new = min(context.sampling.max_new_tokens or context.max_length, context.max_length)
        if new == 1:
            end = Terminal(
                request=key, attempt=attempt, position=length + 1, status="maximum_length"
            )
            self.prefill.out.append(end)
            return
        self.prefill.out.append(report)
        self.decode.out.append(Tokens(runs=[first]))  # a router may see this worker first
        self._running[key] = _Running(key, attempt, length + 1, length + new)

    def _step(self) -> None:
        runs, ends = [], []
        for one in list(islice(self._running.values(), self._slots)):
            runs.append(TokenRun(one.key, one.attempt, one.position, [_TOKEN]))
            one.position += 1
            if one.position >= one.end:
                del self._running[one.key]
                end = Terminal(
                    request=one.key, attempt=one.attempt, position=one.position,
                    status="maximum_length",
                )  # fmt: skip
                ends.append(end)
        self.decode.out += [Tokens(runs=runs), *ends]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--slots", type=int, default=0, help="batch slots (0: no limit)")
    options = parser.parse_args()
    Workers(options.address, options.step_ms / 1000, options.slots).run()


if __name__ == "__main__":
    main()
