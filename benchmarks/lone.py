"""A lone request: what a router adds to the time in which a client and a worker could do it.

Client and worker are separate processes, as in a cluster, and idle until something
comes. The client asks the worker directly, through ``zmq.proxy`` and through a router, taking
turns; a prefill worker ends the request with its first token, at once. Before the next one the
router has done everything, acknowledgement included. Most of the time are wake-ups: each
process has two threads to wake, ZeroMQ's and its own.

    python -m baton.benchmarks.lone [--rounds 1500]
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import zmq

from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import (
    Accepted,
    Assign,
    FinalAck,
    Heartbeat,
    Message,
    Ping,
    Pong,
    RouterToClient,
    Submit,
    Terminal,
    TokenRun,
    Tokens,
)

from .scratch import scratch_folder
from .synthetic import (
    PROMPT,
    Context,
    Link,
    child,
    cpu_seconds,
    new_submit,
    router_in,
    serve_proxy,
    worker_link,
)

BAR_US = 300
TURN = 50
"""Requests one way before the next way has its turn."""


# ---------------------------------------------------------------------------------- worker


def short_life(key: bytes, attempt: int) -> list[Message]:
    """A prefill worker's report of a request that ends with its first token."""
    return [
        Accepted(request=key, attempt=attempt),
        Tokens(runs=[TokenRun(key, attempt, PROMPT, [2])]),
        Terminal(request=key, attempt=attempt, position=PROMPT + 1, status="end_of_sequence"),
    ]


def work_directly(address: str, *, bound: bool) -> None:
    """Answer every Submit that comes to a ROUTER, or by a proxy to a DEALER."""
    context: Context = zmq.Context()
    socket = context.socket(zmq.ROUTER if bound else zmq.DEALER)
    if bound:
        socket.bind(address)
    else:
        socket.connect(address)
    encoder, decoder = EnvelopeEncoder(), EnvelopeDecoder[Message](Submit)
    while True:
        identity, *frames = socket.recv_multipart()
        decoder.decode(frames)
        socket.send_multipart([identity, *encoder.encode(short_life(bytes(16), 1)[1:])])


def work_for_router(address: str) -> None:
    """A prefill worker that answers every Assign, and a decode worker that is only there."""
    context: Context = zmq.Context()
    prefill, decode = (worker_link(context, address, role, 0) for role in ("prefill", "decode"))
    beat_at = time.monotonic()
    while True:
        now = time.monotonic()
        if now >= beat_at:
            beat_at = now + 0.2
            for incarnation, link in ((1, prefill), (3, decode)):
                link.out.append(Heartbeat(incarnation=incarnation, progress=0))
                link.flush()
            decode.read()
        if prefill.socket.poll(int((beat_at - now) * 1000)):
            for message in prefill.read_one():
                if type(message) is Assign:
                    prefill.out += short_life(message.request, message.attempt)
            prefill.flush()


# ---------------------------------------------------------------------------------- client


def ask(link: Link, number: int) -> tuple[float, bytes]:
    """Seconds from Submit to Terminal, and the key of the request."""
    submit = new_submit(number, 1)
    start = time.perf_counter()
    link.out.append(submit)
    link.flush()
    while True:
        for message in link.read_one():
            if type(message) is Terminal:
                return time.perf_counter() - start, message.request


def settle(link: Link, key: bytes) -> None:
    """Acknowledge the end to a router, and wait until it has nothing left to do."""
    link.out += [FinalAck(requests=[key]), Ping()]
    link.flush()
    while not any(type(message) is Pong for message in link.read_one()):
        pass


def measure(folder: Path, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of each request by the way it took, and the router's CPU time for one."""
    config, router = router_in(folder)
    address = f"ipc://{folder}/lone"
    name = "baton.benchmarks.lone"
    context: Context = zmq.Context()
    with ExitStack() as stack:
        pid = stack.enter_context(child(router))
        for arguments in (
            ["--proxy", address],
            ["--work", "router", "--address", config.worker_address],
            ["--work", "proxy", "--address", f"{address}-back"],
            ["--work", "direct", "--address", f"{address}-direct"],
        ):
            stack.enter_context(child([name, *arguments]))
        ways = {
            way: Link(context, at, RouterToClient, f"client-{way}")
            for way, at in (
                ("direct", f"{address}-direct"),
                ("proxy", f"{address}-front"),
                ("router", config.client_address),
            )
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        cpu = 0.0
        for turn in range(-1, max(1, rounds // TURN)):  # the first is a warm-up
            for way, link in ways.items():
                before = cpu_seconds(pid)
                for number in range(TURN):
                    seconds, key = ask(link, (turn + 1) * TURN + number)
                    if way == "router":
                        settle(link, key)
                    if turn >= 0:
                        times[way].append(seconds)
                if way == "router" and turn >= 0:
                    cpu += cpu_seconds(pid) - before
        for link in ways.values():
            link.socket.close()
        context.term()
    return times, cpu / len(times["router"])


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--proxy", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.proxy:
        serve_proxy(options.proxy)
    elif options.work == "router":
        work_for_router(options.address)
    elif options.work:
        work_directly(options.address, bound=options.work == "direct")
    else:
        with scratch_folder() as folder:
            times, cpu = measure(folder, options.rounds)
        direct = statistics.median(times["direct"])
        print("lone request, µs     p50     p10     p90   p50 added   bar")
        for way, took in times.items():
            p50, tenths = statistics.median(took), statistics.quantiles(took, n=10)
            line = f"{way:<16}{p50 * 1e6:>8.0f}{tenths[0] * 1e6:>8.0f}{tenths[-1] * 1e6:>8.0f}"
            bar = f"{BAR_US:>6}" if way == "router" else ""
            print(f"{line}{(p50 - direct) * 1e6:>12.0f}{bar}")
        print(f"the router's CPU time for one: {cpu * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
