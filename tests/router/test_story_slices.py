"""A story as nested slices: order, parents, clocks of several processes that do not agree."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.router.story_slices import slices_of


def record(**fields: Any) -> dict[str, Any]:
    return {
        "request_id": "r", "state": "finished", "code": None, "seconds": 3.0,
        "attempts": [attempt()], **fields,
    }  # fmt: skip


def attempt(**fields: Any) -> dict[str, Any]:
    return {
        "number": 1, "prefill": "prefill-0", "decode": "decode-1", "cause": "",
        "assigned_s": 0.1, "ended_s": 3.0,
        "route": {
            "policy": "prefix_aware", "way": "handoff", "why": "", "pinned": "",
            "prefill": {"load_tokens": 5, "cached_tokens": 128}, "decode": None,
        },
        "prefill_times": {
            "received_s": 0.2, "started_s": 0.3, "granted_s": 0.4, "computing_s": 0.5,
            "sending_s": 0.7, "computed_s": 1.0, "ended_s": 1.2, "refusals": 0,
        },
        "decode_times": {
            "taken_over_s": 1.1, "computing_s": 1.3, "computed_s": 1.4, "ended_s": 2.9,
            "preemptions": 1,
        },
        "handoff": {
            "transport": "shm", "bytes_sent": 9, "bytes_received": 9, "blocks": 2, "frames": 1,
            "resent_frames": 0, "cached_tokens": 0, "seconds": 0.9, "reported_s": 1.25,
        },
        **fields,
    }  # fmt: skip


def check_nesting(slices) -> None:
    assert slices[0].parent == -1
    for index, part in enumerate(slices):
        assert part.end >= part.start >= 0.0
        if index:
            around = slices[part.parent]
            assert 0 <= part.parent < index
            assert around.start <= part.start
            assert part.end <= around.end


def test_slices_of_a_request():
    slices = slices_of(record(), "router-1")
    check_nesting(slices)
    found = [(one.name, one.process, one.start, one.end) for one in slices]
    assert found == [
        ("request", "router-1", 0.0, 3.0),
        ("queue", "router-1", 0.0, 0.1),
        ("attempt 1", "router-1", 0.1, 3.0),
        ("prefill", "prefill-0", 0.2, 1.2),
        ("queue", "prefill-0", 0.2, 0.3),
        ("wait for grant", "prefill-0", 0.3, 0.4),
        ("wait for batch", "prefill-0", 0.4, 0.5),
        ("compute", "prefill-0", 0.5, 1.0),
        ("transfer", "prefill-0", 0.7, 1.2),
        ("decode", "decode-1", 1.1, 2.9),
        ("wait for batch", "decode-1", 1.1, 1.3),
        ("generate", "decode-1", 1.3, 2.9),
    ]
    assert slices[2].details["prefill_cached_tokens"] == 128
    assert slices[8].details["transport"] == "shm"


def test_both_attempts_of_a_replay_have_slices():
    lost = attempt(ended_s=1.5, cause="worker decode-0 was lost", decode_times=None)
    lost["decode"] = "decode-0"
    again = attempt(number=2, prefill="prefill-1", assigned_s=1.7, prefill_times=None, handoff=None)
    slices = slices_of(record(attempts=[lost, again]))
    check_nesting(slices)
    assert [(s.name, s.error) for s in slices if s.name.startswith("attempt")] == [
        ("attempt 1", "worker decode-0 was lost"),
        ("attempt 2", ""),
    ]
    assert [(s.start, s.end) for s in slices if s.name == "queue" and s.process == "router"] == [
        (0.0, 0.1),
        (1.5, 1.7),
    ]
    assert [(s.process, s.start) for s in slices if s.name == "decode"] == [
        ("decode-0", 1.25),  # since the handoff's report
        ("decode-1", 1.7),
    ]


@pytest.mark.parametrize("state", ["refused", "failed"])
def test_a_request_without_attempts_is_one_slice(state):
    (only,) = slices_of(record(state=state, code="capacity", attempts=[], seconds=0.0))
    assert only.error == "capacity"


def test_slices_nest_whatever_the_clocks_say():
    rng = random.Random(5)
    for _ in range(300):
        attempts = [attempt(number=number) for number in range(rng.randrange(4))]
        for one in attempts:
            for times in (one["prefill_times"], one["decode_times"], one):
                for name in times:
                    if name.endswith("_s"):
                        times[name] = rng.choice([None, rng.uniform(-1, 5)])
            one["prefill_times"] = rng.choice([None, one["prefill_times"]])
            one["decode_times"] = rng.choice([None, one["decode_times"]])
        check_nesting(slices_of(record(attempts=attempts, seconds=rng.uniform(0, 4))))
