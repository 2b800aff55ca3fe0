"""``baton trace``: the text of a story, the list, and the file for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, Self

import pytest

from baton.cli.command import main
from baton.cli.trace import describe, listed, trace_file
from baton.proto.errors import ConnectionLost


def story(**fields: Any) -> dict[str, Any]:
    route = {
        "policy": "prefix_aware", "way": "handoff", "why": "", "pinned": "decode",
        "prefill": {
            "load_tokens": 320, "cached_tokens": 448, "cost": -368.0, "next_best": "prefill-1",
            "next_cost": 80.0, "candidates": 2,
        },
        "decode": {"load_tokens": 0, "cached_tokens": 0},
    }  # fmt: skip
    attempt = {
        "number": 1, "prefill": "prefill-0", "decode": "decode-0", "cause": "", "assigned_s": 0.001,
        "ended_s": 0.5, "route": route,
        "prefill_times": {
            "received_s": 0.002, "started_s": 0.003, "granted_s": 0.004, "computing_s": 0.005,
            "sending_s": 0.006, "computed_s": 0.1, "ended_s": 0.11, "refusals": 0,
        },
        "decode_times": {
            "taken_over_s": 0.105, "computing_s": 0.106, "computed_s": 0.12, "ended_s": 0.499,
            "preemptions": 0,
        },
        "handoff": {
            "transport": "shm", "bytes_sent": 3 << 20, "bytes_received": 3 << 20, "blocks": 24,
            "frames": 2, "resent_frames": 0, "cached_tokens": 64, "seconds": 0.107,
            "reported_s": 0.111,
        },
    }  # fmt: skip
    return {
        "router": "router-0", "request_id": "chatcmpl-mine", "request": "ab" * 16,
        "client": "00ff", "gateway": "gateway-0", "traceparent": "", "state": "finished",
        "task": "generate", "resumed": False, "finish_reason": "maximum_length", "code": None,
        "message": "", "age_s": 12.5, "seconds": 0.5, "queue_s": 0.005, "ttft_s": 0.101,
        "itl_s": 0.0123, "slo_ttft_s": None, "slo_itl_s": None,
        "first_token_s": 0.101, "last_token_s": 0.5, "prompt_tokens": 512,
        "cached_tokens": 448, "new_tokens": 33, "attempts": [attempt], **fields,
    }  # fmt: skip


def test_a_story_tells_route_waits_bytes_and_transport():
    text = "\n".join(describe(story()))
    for part in (
        "request chatcmpl-mine (key abab",
        "finished: maximum_length",
        "client 00ff through gateway-0 at router-0, 12.5 s ago",
        "512 prompt tokens (448 cached), 33 new tokens",
        "TTFT 101.0 ms, mean ITL 12.3 ms, queue 5.0 ms, all 500.0 ms",
        "prefill-0: prefix_aware cost -368, next best prefill-1 80, 2 candidates",
        "(about 448 tokens cached, load 320 tokens)",
        "decode-0: target_endpoint of the request",
        "3.0 MiB in 24 blocks and 2 frames over shm, 64 tokens already there",
        "wait for grant",
        "generate",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ({"chosen_by": "own:Class", "candidates": 2}, "prefill-0: chosen by own:Class, 2 cand"),
        (
            {
                "chosen_by": "prefix_aware", "candidates": 2, "instead_of": "own:Class",
                "because": "failed", "cost": 25.0, "next_best": "prefill-1", "next_cost": 50.0,
            },
            "next best prefill-1 50, 2 candidates, because own:Class failed (about",
        ),
        ({}, "prefill-0: the only candidate (about"),
    ],
)  # fmt: skip
def test_a_story_names_what_chose_a_worker(side, text):
    found = story()
    route = found["attempts"][0]["route"]
    route["policy"] = "own:Class"
    route["prefill"] = {"load_tokens": 0, "cached_tokens": 0, **side}
    assert text in "\n".join(describe(found))


def test_a_replay_and_a_refusal_tell_their_cause():
    lost = story()["attempts"][0] | {"cause": "worker prefill-0 was lost", "handoff": None}
    text = "\n".join(describe(story(attempts=[lost, story()["attempts"][0] | {"number": 2}])))
    assert "attempt 1: worker prefill-0 was lost" in text
    assert "attempt 2\n" in text
    refused = story(
        state="refused", code="capacity", message="overloaded", finish_reason=None, attempts=[],
        ttft_s=None, itl_s=None, queue_s=None,
    )  # fmt: skip
    assert "refused: capacity: overloaded" in "\n".join(describe(refused))
    assert "refused" in listed([refused])[1]


def test_own_limits_are_shown_with_those_that_were_missed():
    assert "own limits" not in "\n".join(describe(story()))
    text = "\n".join(describe(story(slo_ttft_s=0.1, slo_itl_s=0.02)))
    assert "  own limits: TTFT 100.0 ms (missed), mean ITL 20.0 ms\n" in text
    assert "own limits: TTFT 200.0 ms\n" in "\n".join(describe(story(slo_ttft_s=0.2)))


def test_the_list_has_one_line_per_request():
    head, line = listed([story()])
    assert head.split()[:3] == ["age", "state", "prompt"]
    assert line.split() == [
        "12.5s", "finished", "512", "448", "33", "101.0", "ms", "12.3", "ms", "500.0", "ms",
        "prefill-0", ">", "decode-0", "chatcmpl-mine",
    ]  # fmt: skip


def test_a_request_that_ended_at_its_prefill_worker_names_no_decode_worker():
    alone = story()["attempts"][0] | {"handoff": None, "decode_times": None}
    short = story(attempts=[alone], new_tokens=1)
    assert "prefill-0 > decode-0" not in listed([short])[1]
    text = "\n".join(describe(short))
    assert "512 prompt tokens (448 cached), 1 new token\n" in text
    assert "handoff  none: the request ended at its prefill worker" in text
    assert "prefill-0 > decode-0" in listed([short | {"state": "running"}])[1]


def test_a_count_of_one_is_singular():
    alone = story()["attempts"][0]
    handoff = alone["handoff"] | {"blocks": 1, "frames": 1, "cached_tokens": 1}
    text = "\n".join(describe(story(attempts=[alone | {"handoff": handoff}])))
    assert "in 1 block and 1 frame over shm, 1 token already there" in text


def test_an_empty_list_says_so(monkeypatch, capsys):
    monkeypatch.setattr("baton.cli.trace._ask_all", lambda _arguments: [])
    assert main(["trace", "--last", "5"]) == 0
    assert capsys.readouterr().out == "no requests\n"


def test_a_perfetto_file_has_a_process_per_worker_and_nested_slices():
    content = trace_file([story(), story(request_id="other", age_s=12.4)], now=1_800_000_000.0)
    content = json.loads(json.dumps(content))
    assert content.keys() == {"traceEvents", "displayTimeUnit"}
    names: dict[int, str] = {}
    shown: dict[tuple[int, int], str] = {}
    threads: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in content["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            else:
                shown[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(names.values()) == ["decode-0", "prefill-0", "router-0"]
    assert {pid for pid, _ in threads} == names.keys()
    assert shown.keys() == threads.keys()
    requests = ["chatcmpl-mine", "chatcmpl-mine transfer", "other", "other transfer"]
    assert sorted(set(shown.values())) == requests
    for slices in threads.values():
        check_stack(slices)
    first = min(start for slices in threads.values() for start, _ in slices)
    assert first == pytest.approx((1_800_000_000.0 - 12.5) * 1e6, abs=1.0)


def check_stack(slices: list[tuple[float, float]]) -> None:
    """Slices of one thread nest: each lies inside all that are open when it starts."""
    open_ends: list[float] = []
    for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
        while open_ends and open_ends[-1] <= start + 1e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 1e-3
        open_ends.append(end)


def without_router(one: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key != "router"}


class Router:
    """A client of one router with a story; the router named ``dead`` does not answer."""

    def __init__(self, address: str, **_: object) -> None:
        self.name = address.rpartition("/")[2]

    def __enter__(self) -> Self:
        if self.name == "dead":
            raise ConnectionLost("no answer")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self, *, handoffs: int, requests: int, request: str) -> dict[str, Any]:
        assert (handoffs, request) == (0, "")
        age = {"a": 1.0, "b": 2.0}[self.name]
        ended = [story(request_id=f"of-{self.name}", age_s=age)]
        running = [story(request_id=f"runs-{self.name}", age_s=age - 0.5, state="decoding")]
        stories = ended if requests == 20 else ended + running
        return {"router": {"name": self.name}, "requests": [without_router(s) for s in stories]}


def test_the_stories_of_all_routers_that_answer_are_one_list(monkeypatch, capsys):
    monkeypatch.setattr("baton.cli.trace.Client", Router)
    assert main(["trace", "--json", "--address", "ipc:///a,ipc:///dead,ipc:///b"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["router"], one["request_id"]) for one in found] == [("b", "of-b"), ("a", "of-a")]
    assert main(["trace", "--address", "ipc:///dead"]) == 1
    assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_list_has_as_many_requests_as_asked_for(count, monkeypatch, capsys):
    """Each router adds its unfinished requests to as many that have ended."""
    monkeypatch.setattr("baton.cli.trace.Client", Router)
    words = ["trace", f"--last={count}", "--address", "ipc:///a,ipc:///b"]
    assert main([*words, "--json"]) == 0
    found = [one["request_id"] for one in json.loads(capsys.readouterr().out)]
    assert found == ["of-b", "runs-b", "of-a", "runs-a"][-count:]
    assert main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + count


def test_ids_of_clients_cannot_control_the_terminal(capsys, monkeypatch):
    hostile = story(request_id="r\x1b[2J\rgone\u202e", message="\x1b]0;x\x07")
    monkeypatch.setattr("baton.cli.trace._ask_all", lambda _: [hostile])
    for words in (["r-unknown"], []):
        assert main(["trace", *words]) == 0
        printed = capsys.readouterr().out
        assert "r?[2J?gone?" in printed
        assert printed.replace("\n", "").isprintable()


def made(client_id: str, number: int, end: str = "", **fields: Any) -> dict[str, Any]:
    """A story of an HTTP request; gateways' ids share their beginning."""
    own = f"chatcmpl-{client_id}-0123456789abcd{number:010x}{end}"
    return story(request_id=own, request=f"{number:032x}", age_s=100.0 - number, **fields)


def test_a_part_of_several_ids_lists_the_latest_of_them_and_fails(capsys, monkeypatch):
    stories = [made("mine\x1b", number) for number in range(12)]
    monkeypatch.setattr("baton.cli.trace._ask_all", lambda _: stories)
    for words in ([], ["--json"], ["--perfetto", "/nonexistent/file"]):
        assert main(["trace", "chatcmpl-mine", *words]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        head, *lines, last = err.splitlines()
        assert head.split()[:2] == ["age", "state"]
        ages = [f"{100.0 - number:.1f}s" for number in range(11, 1, -1)]
        assert [line.split()[0] for line in lines] == ages
        assert "finished" in lines[0] and "mine?-0123456789abcd000000000b" in lines[0]
        assert last.startswith("baton: 'chatcmpl-mine' matches 12 requests; these are the last 10:")


def test_a_whole_id_names_its_requests_also_if_other_ids_contain_it(capsys, monkeypatch):
    choices = [made("7", 1, "-0"), made("7", 1, "-1"), made("7", 2)]
    others = [made("a-7-b", 3), story(request_id="native-7-request", gateway="", request="ab" * 16)]
    monkeypatch.setattr("baton.cli.trace._ask_all", lambda _: [*others, *choices])

    def found(name: str) -> list[dict[str, Any]]:
        assert main(["trace", name, "--json"]) == 0
        answer: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return answer

    assert found("7") == choices
    assert found(choices[0]["request_id"]) == choices[:1]
    assert found(choices[0]["request_id"][:-2]) == choices[:2]
    assert found("native-7-request") == found("ab" * 16) == others[1:]


def test_a_part_of_one_id_shows_all_choices_of_its_request(capsys, monkeypatch):
    choices = [made("mine", 1, "-0"), made("mine", 1, "-1")]
    monkeypatch.setattr("baton.cli.trace._ask_all", lambda _: choices)
    assert main(["trace", "chatcmpl-mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == choices


def test_the_error_for_an_unknown_request_names_refusals_of_gateways(capsys, monkeypatch):
    monkeypatch.setattr("baton.cli.trace._ask_all", lambda _: [])
    assert main(["trace", "unknown-request"]) == 1
    assert "a gateway refused the request (such as 400 or 404)" in capsys.readouterr().err


def test_a_request_and_last_exclude_each_other(capsys):
    assert main(["trace", "some-id", "--last", "3"]) == 2
    assert "either a request id or --last" in capsys.readouterr().err


def test_a_list_of_no_requests_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trace", "--last", "0"])
    assert ended.value.code == 2
    assert "--last: '0' is not a whole number, 1 or more" in capsys.readouterr().err
