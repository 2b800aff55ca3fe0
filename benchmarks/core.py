"""The router's core alone: CPU time of its decisions per request, without sockets and encoding.

Requests of 32 prompt tokens and two new tokens run from Submit to FinalAck, 64 at a time, on two
prefill and two decode workers. Every envelope is about one request. The messages of each step are
made just before the step and not timed, so the cache holds them as if they were just decoded.
"stories" is what a tick does for the request log: the stories of ended requests. The figures are
CPU time, the best of many runs of 2,048 requests, because other processes on the machine only add
to it. The numbers of bytecodes and calls do not depend on the load at all.

    python -m baton.benchmarks.core
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from baton.proto.limits import PROTOCOL_VERSION
from baton.proto.wire import messages
from baton.proto.wire.messages import (
    Accepted,
    Assign,
    FinalAck,
    HandoffReport,
    Hello,
    Message,
    Submit,
    Terminal,
    TokenRun,
    Tokens,
)
from baton.proto.wire.wire_context import WireContext, WireTokens
from baton.router.config import AdmissionConfig, RouterConfig
from baton.router.core import RouterCore
from baton.router.events import Action, Event, FromClient, FromWorker, Tick, ToWorker

from .synthetic import CARD, PROMPT, new_submit

REQUESTS, WINDOW, RUNS = 2048, 64, 25
STEPS = ("submit", "prefill", "decode", "ack", "stories")
EVERY_S = 0.00003
HAS_STORIES = "times" in Terminal.__struct_fields__
"""False in older checkouts."""
PREFILL_TIMES = {"started": 0.0001, "granted": 0.0002, "computing": 0.0003, "computed": 0.004}
DECODE_TIMES = {"computing": 0.0003, "computed": 0.004, "ended": 0.02}
CONTEXTS = [new_submit(number, 2).context for number in range(1024)]


def times(known: dict[str, Any]) -> dict[str, Any]:
    """Return the field with the worker's times, if this checkout has it."""
    return {"times": messages.WorkerTimes(**known)} if HAS_STORIES else {}


def new_core() -> RouterCore:
    """Return a router with two prefill and two decode workers."""
    config = RouterConfig(
        client_address="ipc:///clients",
        worker_address="ipc:///workers",
        cluster_key="ab" * 32,
        admission=AdmissionConfig(max_context_bytes=4 << 30),
    )
    fresh: dict[str, Any] = {"fresh_stories": True} if HAS_STORIES else {}
    core = RouterCore(config, incarnation=7, now=100.0, **fresh)
    for number, name in enumerate(("prefill-0", "prefill-1", "decode-0", "decode-1")):
        hello = Hello(
            version=PROTOCOL_VERSION,
            worker=name,
            role=name.partition("-")[0],
            incarnation=number + 1,
            pid=1,
            endpoint=f"ipc:///{name}",
            model=CARD,
            max_batch=WINDOW,
        )
        core.handle(FromWorker(name.encode(), [hello]), 100.0)
    return core


def new_request(number: int) -> Submit:
    """Return a Submit whose arrays no other one shares."""
    context = CONTEXTS[number % len(CONTEXTS)]
    own = WireContext(
        tokens=WireTokens(context.tokens.array.copy()),
        max_length=context.max_length,
        sampling=context.sampling,
        eos_token_ids=[2],
    )
    return Submit(request_id=str(number), context=own, serial=number + 1)


def answers(prefill: str, assign: Assign) -> tuple[list[Message], list[Message]]:
    """Return the messages of the prefill and of the decode worker about a request."""
    key, attempt = assign.request, assign.attempt
    decode = assign.decode.removeprefix("ipc:///")
    report = HandoffReport(
        request=key, attempt=attempt, prefill=prefill, decode=decode, transport="zmq",
        bytes_sent=4096, bytes_received=4096, blocks=2, cached_tokens=0, frames=1, seconds=0.002,
        **times(PREFILL_TIMES),
    )  # fmt: skip
    end = Terminal(
        request=key, attempt=attempt, position=PROMPT + 2, status="maximum_length",
        prefill=prefill, decode=decode, **times(DECODE_TIMES),
    )  # fmt: skip
    first, second = TokenRun(key, attempt, PROMPT, [11]), TokenRun(key, attempt, PROMPT + 1, [12])
    accepted = Accepted(request=key, attempt=attempt)
    return [accepted, Tokens(runs=[first]), report], [Tokens(runs=[second]), end]


class Run:
    """One router core, its time, and the seconds of CPU time of each of the :data:`STEPS`."""

    def __init__(self) -> None:
        self.core = new_core()
        self.took = [0.0] * len(STEPS)
        self._now = 101.0
        self.served = 0

    def play(self, requests: int) -> list[float]:
        """Serve requests; return the microseconds per request of each step."""
        took = self.took = [0.0] * len(STEPS)
        for _ in range(0, requests, WINDOW):
            self._window(range(self.served, self.served + WINDOW))
            self.served += WINDOW
        return [1e6 * seconds / requests for seconds in took]

    def _window(self, numbers: range) -> None:
        clients = [b"client-%d" % (number % 4) for number in numbers]
        submits = [new_request(number) for number in numbers]
        actions = self._step(0, map(FromClient, clients, ([one] for one in submits)))
        assigns = [
            (action.identity, action.message)
            for action in actions
            if type(action) is ToWorker and type(action.message) is Assign
        ]
        sent = [answers(prefill.decode(), assign) for prefill, assign in assigns]
        prefills = (prefill for prefill, _ in assigns)
        decodes = (assign.decode.removeprefix("ipc:///").encode() for _, assign in assigns)
        self._step(1, map(FromWorker, prefills, (own for own, _ in sent)))
        self._step(2, map(FromWorker, decodes, (own for _, own in sent)))
        acks = [[FinalAck(requests=[assign.request])] for _, assign in assigns]
        self._step(3, map(FromClient, clients, acks))
        self.core.handle(Tick(), self._now)
        begun = time.process_time()
        if HAS_STORIES:
            self.core.stories.take_fresh()
        self.took[4] += time.process_time() - begun

    def _step(self, step: int, events: Iterable[Event]) -> list[Action]:
        """Time how long the core takes for the events; return all actions."""
        ready, handle, now, found = [*events], self.core.handle, self._now, []
        begun = time.process_time()
        for event in ready:
            now += EVERY_S
            found.append(handle(event, now))
        self.took[step] += time.process_time() - begun
        self._now = now
        return [action for actions in found for action in actions]


def counted(requests: int) -> tuple[float, float]:
    """Return the bytecodes and the calls per request in the core's modules."""
    bytecodes = calls = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal bytecodes, calls
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        bytecodes += event == "opcode"
        calls += event == "call"
        return trace if frame.f_code.co_filename != __file__ else None

    run = Run()
    run.play(WINDOW)
    sys.settrace(trace)
    try:
        run.play(requests)
    finally:
        sys.settrace(None)
    return bytecodes / requests, calls / requests


def measure() -> dict[str, list[float]]:
    """Return the best time of each step in µs, and the numbers of :func:`counted`."""
    counts = counted(10 * WINDOW)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)  # as in a router process
    run = Run()
    run.play(REQUESTS)
    runs = [run.play(REQUESTS) for _ in range(RUNS)]
    return {"steps": [min(step) for step in zip(*runs, strict=True)], "counts": [*counts]}


def figures(_seconds: float) -> dict[str, float]:
    """Return requests per CPU-second of each step and of the core without stories."""
    steps = measure()["steps"]
    found = dict(zip(STEPS, steps, strict=True), core=sum(steps[:4]), all=sum(steps))
    return {f"requests/CPU-s, {name}": 1e6 / us for name, us in found.items() if us}


def main(arguments: list[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args(arguments)
    found = measure()
    names = (*STEPS, "core", "all", "bytecodes", "calls")
    print(f"{'µs per request':<16}" + "".join(f"{name:>11}" for name in names))
    steps = found["steps"]
    numbers = [f"{us:>11.2f}" for us in (*steps, sum(steps[:4]), sum(steps))]
    numbers += [f"{count:>11.0f}" for count in found["counts"]]
    print(f"{'core':<16}" + "".join(numbers))


if __name__ == "__main__":
    main()
