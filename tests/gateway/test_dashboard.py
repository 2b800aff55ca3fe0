"""The report and the history of the dashboard: all routers as one."""

import msgspec

from baton.deploy.report import RequestCounts
from baton.gateway.dashboard import _PAGE, SHOWN_SAMPLES, joint_history, joint_report


def report(name: str, *, finished: int, p50: float | None, heard: float, state: str) -> dict:
    latency = {"count": finished, "p50": p50}
    worker = {"id": "decode-0", "heard_s_ago": heard, "state": state, "handoff_bytes": finished}
    router = {
        "name": name, "uptime_s": heard, "restarts": 1, "model": "m",
        "requests": {"finished": finished}, "rates": {"requests_per_s": 0.5 * finished},
        "latency": {"first_token_s": latency},
    }  # fmt: skip
    return {"router": router, "workers": [worker], "requests": [{"request": name}], "failed": []}


def test_one_router_is_shown_as_it_is():
    one = report("router", finished=3, p50=None, heard=0.1, state="ready")
    assert joint_report([one]) is one


def test_several_routers_are_shown_as_one_cluster():
    first = report("a", finished=3, p50=None, heard=2.0, state="suspect")
    second = report("b", finished=4, p50=0.25, heard=0.5, state="ready")
    third = report("c", finished=0, p50=0.125, heard=1.0, state="suspect")
    joint = joint_report([first, second, third])
    assert joint["router"] == {
        "name": "a, b, c", "uptime_s": 2.0, "restarts": 1, "model": "m",
        "requests": {"finished": 7}, "rates": {"requests_per_s": 3.5},
        "latency": {"first_token_s": {"count": 4, "p50": 0.25}},
    }  # fmt: skip
    (worker,) = joint["workers"]
    assert (worker["state"], worker["handoff_bytes"]) == ("ready", 7)
    assert [one["request"] for one in joint["requests"]] == ["a", "b", "c"]
    assert first["workers"][0]["handoff_bytes"] == 3


def test_the_page_shows_each_way_in_which_requests_end():
    counts = {field.name for field in msgspec.structs.fields(RequestCounts)}
    other = {"submitted", "refused_by_reason", "moved", "local"}
    assert [name for name in sorted(counts - other) if b"r." + name.encode() not in _PAGE] == []


def history(ages: list[float], rates: list[float], p99s: list[float | None]) -> dict:
    columns = {"age_s": ages, "requests_per_s": rates, "ttft_p99_s": p99s}
    return {"interval_s": 5.0, "columns": columns}


def test_samples_of_several_routers_are_joined_by_their_age():
    first = history([13.1, 8.0, 3.1], [1.0, 2.0, 3.0], [None, 0.5, None])
    second = history([5.2, 0.2], [10.0, 20.0], [0.25, None])
    joint = joint_history([first, second])
    assert joint["columns"] == {
        "requests_per_s": [1.0, 12.0, 23.0], "ttft_p99_s": [None, 0.5, None]
    }  # fmt: skip
    assert (joint["interval_s"], joint["age_s"]) == (5.0, 0.2)


def test_a_gap_of_a_stopped_router_stays_a_gap():
    stopped = history([42.0, 27.0, 22.0], [1.0, 2.0, 3.0], [None] * 3)
    assert joint_history([stopped])["columns"]["requests_per_s"] == [
        1.0, None, None, 2.0, 3.0, None, None, None, None
    ]  # fmt: skip
    running = history([6.0, 1.0], [10.0, 10.0], [None] * 2)
    both = joint_history([stopped, running])["columns"]["requests_per_s"]
    assert both[-5:] == [3.0, None, None, 10.0, 10.0]


def test_histories_may_be_empty_and_are_bounded():
    empty = history([], [], [])
    assert joint_history([empty])["columns"]["requests_per_s"] == []
    long = history([5.0 * n for n in reversed(range(999))], [1.0] * 999, [None] * 999)
    assert len(joint_history([empty, long])["columns"]["requests_per_s"]) == SHOWN_SAMPLES
