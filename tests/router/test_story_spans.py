"""A story as OpenTelemetry spans: ids link, times nest, GenAI attributes, sampling."""

from __future__ import annotations

from typing import Any

import pytest

from baton.router.story_slices import spans_of

from .test_story_slices import attempt

TRACE, SPAN = "4b" * 16, "5c" * 8
NOW_NS = 1_800_000_000 * 10**9


def record(**fields: Any) -> dict[str, Any]:
    return {
        "request_id": "chatcmpl-1", "request": "ab" * 16, "client": "c0", "gateway": "gateway-0",
        "traceparent": f"00-{TRACE}-{SPAN}-01", "state": "finished", "task": "generate",
        "finish_reason": "maximum_length", "code": None, "seconds": 3.0, "prompt_tokens": 9,
        "cached_tokens": 4, "new_tokens": 5, "queue_s": 0.5, "ttft_s": 1.0, "itl_s": None,
        "attempts": [attempt()], **fields,
    }  # fmt: skip


def test_spans_link_to_the_callers_trace_and_nest():
    spans = spans_of(record(), "router-1", "tiny", NOW_NS)
    root, rest = spans[0], spans[1:]
    assert {f"{one.trace_id:032x}" for one in spans} == {TRACE}
    assert f"{root.parent_id:016x}" == SPAN
    known = {one.span_id: one for one in spans}
    assert len(known) == len(spans)
    for one in rest:
        around = known[one.parent_id]
        assert around.start_ns <= one.start_ns <= one.end_ns <= around.end_ns
    assert (root.start_ns, root.end_ns) == (NOW_NS, NOW_NS + 3 * 10**9)
    found = {(one.service, one.instance) for one in spans}
    assert found == {
        ("baton-router", "router-1"), ("baton-prefill", "prefill-0"), ("baton-decode", "decode-1"),
    }  # fmt: skip
    transfer = next(one for one in spans if one.name == "transfer")
    assert transfer.attributes["baton.transport"] == "shm"


def test_the_first_span_has_the_genai_attributes():
    root = spans_of(record(), "router-1", "tiny", NOW_NS)[0]
    assert root.is_server
    assert (
        root.attributes.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "baton",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
            "gen_ai.response.id": "chatcmpl-1",
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": 9,
            "gen_ai.usage.output_tokens": 5,
            "baton.cached_tokens": 4,
            "baton.gateway": "gateway-0",
        }.items()
    )
    assert "baton.itl_s" not in root.attributes


def test_without_a_trace_the_requests_key_is_one():
    spans = spans_of(record(traceparent=""), "router-1", "tiny", NOW_NS)
    assert {f"{one.trace_id:032x}" for one in spans} == {"ab" * 16}
    assert spans[0].parent_id == 0
    elsewhere = spans_of(record(traceparent=""), "router-2", "tiny", NOW_NS)
    assert not {one.span_id for one in spans} & {one.span_id for one in elsewhere}


def test_a_trace_that_is_not_sampled_has_no_spans():
    assert spans_of(record(traceparent=f"00-{TRACE}-{SPAN}-00"), "router", "tiny", NOW_NS) == []


def test_both_attempts_of_a_replay_have_worker_spans():
    lost = attempt(cause="worker prefill-0 was lost", ended_s=1.0, decode_times=None, handoff=None)
    again = attempt(number=2, prefill="prefill-1", assigned_s=1.1)
    again["prefill_times"] = {
        name: value + 1.0 if name.endswith("_s") else value
        for name, value in again["prefill_times"].items()
    }
    spans = spans_of(record(attempts=[lost, again]), "router", "tiny", NOW_NS)
    assert [one.instance for one in spans if one.name == "prefill"] == ["prefill-0", "prefill-1"]
    errors = {one.name: one.error for one in spans if one.name.startswith("attempt")}
    assert errors == {"attempt 1": "worker prefill-0 was lost", "attempt 2": ""}


@pytest.mark.parametrize("state", ["failed", "refused"])
def test_a_failed_request_has_an_error(state):
    fields = {"state": state, "code": "capacity", "finish_reason": None, "attempts": []}
    (root,) = spans_of(record(**fields), "router", "tiny", NOW_NS)
    assert (root.error, root.attributes["error.type"]) == ("capacity", "capacity")
