"""The report of the dashboard: all routers as one."""

from baton.gateway.routes import joint_report


def report(name: str, *, finished: int, p50: float | None, heard: float, state: str) -> dict:
    latency = {"count": finished, "p50": p50}
    worker = {"id": "decode-0", "heard_s_ago": heard, "state": state, "handoff_bytes": finished}
    router = {
        "name": name, "uptime_s": heard, "restarts": 1, "model": "m",
        "requests": {"finished": finished}, "rates": {"requests_per_s": 0.5 * finished},
        "latency": {"first_token_s": latency},
    }  # fmt: skip
    return {"router": router, "workers": [worker], "requests": [{"request": name}]}


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
