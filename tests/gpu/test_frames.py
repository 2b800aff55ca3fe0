"""What the cluster's part finds in the log about the frames of a handoff."""

from __future__ import annotations

import json

from baton.benchmarks.gpu.bench_cluster import frames_of_the_last
from baton.benchmarks.gpu.lines import FAILED


def line(event: str, frame: int, second: float, **more: float) -> str:
    stamp = f"2026-11-27T10:00:{second:09.6f}Z"
    return json.dumps({"frame": frame, "layers": 8, **more, "event": event, "timestamp": stamp})


def test_the_last_handoff_counts_whatever_the_order_of_the_lines() -> None:
    log = [
        line("frame.stored", 0, 1.5, seconds=0.1),
        line("frame.packed", 0, 1.0),
        '{"frame": 3, "lay',
        line("frame.packed", 1, 3.0),
        line("frame.stored", 1, 3.5, seconds=0.25),
        line("frame.stored", 0, 2.5, seconds=0.2),
        line("frame.packed", 0, 2.0),
    ]
    found = frames_of_the_last(512, log)
    assert found.figures == {"packed_0": 1.5, "packed_1": 0.5, "stored_0": 1.0, "stored_1": 0.0}
    assert "8 layers: packed 500 ms, stored 0 ns before the last, 250 ms from" in found.result


def test_a_frame_that_is_missing_is_wrong() -> None:
    assert frames_of_the_last(512, []).state == FAILED
    assert frames_of_the_last(512, [line("frame.packed", 0, 1.0)]).state == FAILED
