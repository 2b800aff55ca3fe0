"""Goodput and memory under many times the load that the workers can serve.

A real gateway and router, and workers that compute nothing but have few batch slots, so the
capacity is a number of requests per second that depends on no processor. First it is measured with
as many requests at a time as are admitted. Then ``--times`` as many requests come at even
distances, whatever becomes of the earlier ones; each is a short stream. Goodput is the rate of
complete answers. Then the gateway is idle, and its memory is compared with that before.

The generator has one processor for itself and the cluster the others, if there are two or more.

    python -m baton.benchmarks.overload [--times 10] [--seconds 10] [--slots 4] [--step-ms 10]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import cast

import uvloop

from .gateway import (
    GREEDY,
    MESSAGES,
    PROMPT,
    Load,
    gateway_of,
    mocked,
    request_bytes,
    resident_mb,
    run_load,
)
from .scratch import scratch_folder

LEAST = 0.9
"""Of the capacity, the goodput that must stay."""
MOST_MB = 16.0
"""MB by which the gateway may be larger after the overload."""
NEW = 20
"""Tokens of an answer."""
CONNECTIONS = 2000
"""Maximum connections of the generator; a request that finds none free is not sent."""
_IDLE_S = 5.0
_STATUS_AT = 9


@dataclass
class Offered:
    """What became of the requests. ``waits``: seconds to a refusal."""

    sent: int = 0
    unsent: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """Seconds by which requests were sent late."""


class _Connection(asyncio.Protocol):
    """One kept connection with one request at a time."""

    def __init__(self, free: deque[_Connection], offered: Offered) -> None:
        self._free, self._offered = free, offered
        self._began = 0.0
        self._status = b""
        self._length: int | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> None:
        """Send a request."""
        self._began, self._status, self._tail = time.perf_counter(), b"", b""
        self._length = None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Look for the answer's end."""
        content = self._tail + data
        if not self._status:
            head, found, body = content.partition(b"\r\n\r\n")
            if not found:
                self._tail = content
                return
            self._status = head[_STATUS_AT : _STATUS_AT + 3]
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._length = int(length) if length else None
            content = b"\r\n" + body if self._length is None else body
        if self._length is None:
            ends = content.endswith(b"\r\n0\r\n\r\n")
            self._tail = content[-8:]
        else:
            ends = len(content) >= self._length
            self._tail = content
        if ends:
            self._over(self._status.decode())

    def connection_lost(self, exc: Exception | None) -> None:
        """Count a request whose connection ended."""
        if self._began:
            self._over("lost")
        if self in self._free:
            self._free.remove(self)

    def _over(self, how: str) -> None:
        self._offered.ended[how] += 1
        if how not in ("200", "lost"):
            self._offered.waits.append(time.perf_counter() - self._began)
        self._began = 0.0
        if not self._transport.is_closing():
            self._free.append(self)


async def offer(port: int, request: bytes, rate: float, seconds: float) -> Offered:
    """Send requests at even distances, and wait for the last answers."""
    loop, offered, free = asyncio.get_running_loop(), Offered(), deque[_Connection]()
    count = opened = 0
    begun = time.perf_counter()
    opening: set[asyncio.Task[None]] = set()

    async def open_and_ask() -> None:
        _, one = await loop.create_connection(lambda: _Connection(free, offered), "127.0.0.1", port)
        one.ask(request)

    while (now := time.perf_counter() - begun) < seconds:
        while count < now * rate:
            offered.late.append(now - count / rate)
            count += 1
            if free:
                free.pop().ask(request)
            elif opened < CONNECTIONS:
                opened += 1
                task = loop.create_task(open_and_ask())
                opening.add(task)
                task.add_done_callback(opening.discard)
            else:
                offered.unsent += 1
                continue
            offered.sent += 1
        await asyncio.sleep(0.001)
    counted = Counter(offered.ended)  # the answers within the time
    until = time.perf_counter() + 30
    while sum(offered.ended.values()) < offered.sent and time.perf_counter() < until:
        await asyncio.sleep(0.05)
    offered.ended["unanswered"] = offered.sent - sum(offered.ended.values())
    offered.ended["in time"] = counted["200"]
    for one in list(free):
        one._transport.close()
    return offered


def split_processors() -> tuple[set[int], set[int]]:
    """Return the generator's processor and the cluster's."""
    all_of_them = sorted(os.sched_getaffinity(0))
    if len(all_of_them) < 2:
        return set(all_of_them), set(all_of_them)
    return {all_of_them[0]}, set(all_of_them[1:])


def body_of(kind: str) -> bytes:
    """Return a request that is answered by a stream."""
    common = {**GREEDY, "max_tokens": NEW, "stream": True}
    if kind == "chat":
        return request_bytes("/v1/chat/completions", {"messages": MESSAGES, **common})
    return request_bytes("/v1/completions", {"prompt": PROMPT, **common})


def main() -> int:
    """Print the results; 0 if goodput and memory meet the bars."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--slots", type=int, default=16, help="batch slots of the decode worker")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--kind", choices=("ids", "chat"), default="ids")
    options = parser.parse_args()
    own, others = split_processors()
    os.sched_setaffinity(0, others)  # inherited by the processes that start now
    request = body_of(options.kind)
    workers = ("--slots", str(options.slots), "--step-ms", str(options.step_ms))
    with (
        scratch_folder() as scratch,
        mocked(scratch, workers=workers) as (address, _),
        gateway_of(address, scratch, own=True) as (pid, port),
    ):
        os.sched_setaffinity(0, own)
        load: Load = run_load(port, request, options.slots * 4, options.seconds)
        capacity = load.requests / load.seconds
        time.sleep(1.0)
        before = resident_mb(pid)
        rate = capacity * options.times
        print(f"capacity {capacity:.0f} requests/s; offered {rate:.0f}/s", flush=True)
        offered = uvloop.run(offer(port, request, rate, options.seconds))
        peak = resident_mb(pid)
        time.sleep(_IDLE_S)
        after = resident_mb(pid)
    goodput = offered.ended.pop("in time") / options.seconds
    ends = ", ".join(f"{count} x {how}" for how, count in sorted(offered.ended.items()) if count)
    print(f"sent {offered.sent}, not sent {offered.unsent}: {ends}")
    print(f"late by {statistics.median(offered.late) * 1e3:.1f} ms p50, "
          f"{max(offered.late) * 1e3:.0f} ms at most")  # fmt: skip
    if offered.waits:
        waits = sorted(offered.waits)
        print(f"a refusal took {waits[len(waits) // 2] * 1e3:.1f} ms p50, "
              f"{waits[int(len(waits) * 0.99)] * 1e3:.0f} ms p99")  # fmt: skip
    share = goodput / capacity
    print(f"goodput {goodput:.0f}/s, {share:.1%} of the capacity (bar {LEAST:.0%})")
    print(f"gateway: {before:.0f} MB before, {peak:.0f} at the end of the overload, {after:.0f} MB "
          f"after {_IDLE_S:.0f} s (bar +{MOST_MB:.0f})")  # fmt: skip
    return int(share < LEAST or after - before > MOST_MB)


if __name__ == "__main__":
    sys.exit(main())
