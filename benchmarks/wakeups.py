"""What waking up costs on this machine: what other figures here are made of, and no bar of ours.

A hop wakes ZeroMQ's thread and the peer's; a lone request and a small handoff wait for many of
them. First eight bytes go to another process and back by eventfd, with both on one processor, on
two, and where the kernel puts them; at once again, and after 2 ms in which nothing ran. Then the
same work, a request decoded, checked and encoded as a router does it, in a loop, and after as
long an idle time: a process that was just woken finds its caches cold.

    python -m baton.benchmarks.wakeups [--rounds 500]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from baton.proto.requests import check_wire_context
from baton.proto.wire.envelope import EnvelopeDecoder, EnvelopeEncoder
from baton.proto.wire.messages import Message, Submit

from .synthetic import CARD, new_submit

IDLE_S = 0.002
HEAD = f"{'µs':<44}{'p10':>8}{'p50':>8}{'p90':>8}"


def times_of(work: Callable[[], object], rounds: int, idle_s: float) -> list[float]:
    """Seconds of each call, after ``idle_s`` of sleep."""
    times = []
    for _ in range(rounds):
        if idle_s:
            time.sleep(idle_s)
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def round_trips(mine: set[int], other: set[int], rounds: int, idle_s: float) -> list[float]:
    """Seconds of each round trip to a process on the processors ``other``."""
    there, back = os.eventfd(0), os.eventfd(0)
    child = os.fork()
    if not child:
        os.sched_setaffinity(0, other)
        while os.eventfd_read(there) == 1:  # a larger number is the end
            os.eventfd_write(back, 1)
        os._exit(0)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mine)

    def there_and_back() -> None:
        os.eventfd_write(there, 1)
        os.eventfd_read(back)

    try:
        return times_of(there_and_back, rounds, idle_s)
    finally:
        os.eventfd_write(there, 2)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, before)
        os.close(there)
        os.close(back)


def a_routers_work() -> Callable[[], object]:
    """Decode a Submit, check it, and encode it again."""
    encoder, decoder = EnvelopeEncoder(), EnvelopeDecoder[Message](Submit)
    frames = [bytes(frame) for frame in encoder.encode([new_submit(1, 16)])]

    def work() -> None:
        for message in decoder.decode(frames):
            if isinstance(message, Submit):
                check_wire_context(message.context, CARD)
                encoder.encode([message])

    return work


def show(what: str, times: list[float]) -> None:
    """Print a row."""
    tenths = statistics.quantiles(times, n=10)
    p10, p50, p90 = tenths[0] * 1e6, statistics.median(times) * 1e6, tenths[-1] * 1e6
    print(f"{what:<44}{p10:>8.1f}{p50:>8.1f}{p90:>8.1f}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    rounds = parser.parse_args().rounds
    cores = sorted(os.sched_getaffinity(0))
    places = [("on one processor", {cores[0]}, {cores[0]})]
    if len(cores) > 1:
        places.append(("on two processors", {cores[0]}, {cores[1]}))
    places.append(("wherever the kernel puts them", set(cores), set(cores)))
    print(HEAD)
    for where, mine, other in places:
        for idle, when in ((0.0, "at once"), (IDLE_S, "after 2 ms")):
            show(f"round trip {where}, {when}", round_trips(mine, other, rounds, idle))
    work = a_routers_work()
    for idle, when in ((0.0, "in a loop"), (IDLE_S, "after 2 ms")):
        show(f"a router's work on a Submit, {when}", times_of(work, rounds, idle))


if __name__ == "__main__":
    main()
