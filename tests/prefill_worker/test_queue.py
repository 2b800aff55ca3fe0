"""Many queued jobs: what an event costs does not grow with those it has nothing to do with."""

from __future__ import annotations

import sys

import pytest

from baton.proto.errors import InternalError
from baton.proto.wire.messages import Abort, Adopt, Assign, Busy
from baton.worker.events import FromRouter, Tick

from .test_core import DECODE, ROUTER, Bench, make_context


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def assignment(number: int, attempt: int = 1, decode: str = DECODE) -> FromRouter:
    message = Assign(
        request=key(number), attempt=attempt, request_id="r", context=make_context(),
        decode=decode, deadline=60.0,
    )  # fmt: skip
    return FromRouter(ROUTER, message)


def filled(queued: int, *, linked: bool) -> Bench:
    """A worker whose slots are full, with ``queued`` jobs waiting; or all wait for one link."""
    bench = Bench(max_active=2, max_queue=4096)
    if linked:
        for number in range(2):
            bench.feed(assignment(9000 + number))
        bench.open()
    for number in range(queued):
        bench.core.handle(assignment(number), bench.now)
    bench.core.check_integrity()
    bench.said.clear()
    return bench


def instructions(bench: Bench, event) -> int:
    """Bytecode instructions the core needs for an event."""
    count = 0

    def trace(frame, kind, arg):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += kind == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        bench.core.handle(event, bench.now)
    finally:
        sys.settrace(before)
    bench.core.check_integrity()
    return count


EVENTS = {
    "assign": lambda queued: assignment(queued),
    "assign again": lambda queued: assignment(queued // 2, attempt=2),
    "abort": lambda queued: FromRouter(ROUTER, Abort(request=key(queued // 2), attempt=1)),
    "adopt": lambda queued: FromRouter("router-2", Adopt(request=key(queued // 2), position=0)),
    "tick": lambda queued: Tick(),
}


@pytest.mark.parametrize("linked", [True, False], ids=["slots full", "link not open"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_thousand_queued_jobs_cost_an_event_nothing(event, linked):
    few, many = (
        instructions(filled(queued, linked=linked), EVENTS[event](queued)) for queued in (8, 1024)
    )
    assert few > 50
    assert many < 1.3 * few + 50, f"{event}: {few} instructions with 8 jobs, {many} with 1024"


def test_the_queue_is_served_in_order_of_arrival():
    bench = Bench(max_active=2, max_reserve_tries=9)
    for number in range(4):
        bench.feed(assignment(number))
    bench.open()
    asked = [m.request for _, m in bench.peers if hasattr(m, "hashes")]
    assert asked == [key(0), key(1)]
    for number in (1, 0):  # refused in the other order
        bench.answer(Busy(request=key(number), attempt=1, retry_after=0.1))
    bench.peers.clear()
    for number in (2, 3):
        bench.answer(Busy(request=key(number), attempt=1, retry_after=60.0))
    bench.now += 0.3
    bench.feed(Tick())
    asked = [m.request for _, m in bench.peers if hasattr(m, "hashes")]
    assert asked[-2:] == [key(0), key(1)]


def test_load_tells_what_waits():
    bench = filled(5, linked=True)
    load = bench.core.load()
    assert (load.requests_waiting, load.tokens_waiting) == (5, 50)
    bench.hear(Abort(request=key(3), attempt=1))
    load = bench.core.load()
    assert (load.requests_waiting, load.tokens_waiting) == (4, 40)


def test_a_miscount_is_an_internal_error():
    bench = filled(3, linked=False)
    bench.core._queue.waiting += 1
    with pytest.raises(InternalError):
        bench.core.check_integrity()
