"""Output items of ``/v1/responses``: their stream adds up to them, however the text is divided."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.reader import MessageReader, read_message
from baton.gateway.reasoning import ReasoningSplitter
from baton.gateway.responses_route import ResponseItems
from baton.gateway.tool_calls import HermesParser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'
THOUGHT = "<think>\nHm, 3.\n</think>\n\n"
TEXTS = [
    "plain", "", f"{THOUGHT}Seven.", f"{THOUGHT}I add.\n{CALL}\n{CALL}", f"{CALL}\nDone.",
    f"a {BROKEN} b", f"{CALL}\n{BROKEN}", "<think>forever", f"{THOUGHT}", f"a {CALL[:40]}",
]  # fmt: skip


def reader() -> MessageReader:
    return MessageReader(ReasoningSplitter(is_open=False), HermesParser(("add",)))


def read(parts, *, streamed, cut=False, with_reader=True):
    items = ResponseItems("resp-1", reader() if with_reader else None, streamed=streamed)
    events = [event for part in parts for event in items.push(part, 1)]
    events += items.finish(cut=cut)
    return items, events


def plain(items) -> list[dict]:
    """The items without their random ids."""
    return [{**item, "call_id": "?"} if "call_id" in item else item for item in items]


def replayed(events) -> list[dict]:
    """The items as a client of the stream puts them together."""
    items: list[dict] = []
    for kind, fields in events:
        index = fields["output_index"]
        if kind == "response.output_item.added":
            assert index == len(items)
            assert all(item["status"] != "in_progress" for item in items)
            assert fields["item"]["status"] == "in_progress"
            items.append(fields["item"] | {"status": None})
            continue
        item = items[index]
        assert index == len(items) - 1
        if kind == "response.output_item.done":
            assert {**item, "status": fields["item"]["status"]} == fields["item"]
            item["status"] = fields["item"]["status"]
            continue
        assert fields["item_id"] == item["id"]
        if kind == "response.content_part.added":
            item["content"] = [fields["part"]]
        elif kind == "response.content_part.done":
            assert item["content"] == [fields["part"]]
        elif kind == "response.function_call_arguments.delta":
            item["arguments"] += fields["delta"]
        elif kind == "response.function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (fields["arguments"], fields["name"])
        elif kind.endswith(".delta"):
            assert kind == f"response.{item['content'][0]['type']}.delta"
            part = item["content"][fields["content_index"]]
            item["content"] = [{**part, "text": part["text"] + fields["delta"]}]
        else:
            assert item["content"][0]["text"] == fields["text"], kind
    return items


@pytest.mark.parametrize("text", TEXTS)
def test_the_items_of_an_answer(text):
    """They have what a chat's message has."""
    for cut in (False, True):
        wanted = read_message(reader(), text, cut=cut)
        items, _ = read([text], streamed=False, cut=cut)
        found = items.shown()
        texts = {"message": "", "reasoning": ""}
        for item in found:
            if item["type"] != "function_call":
                texts[item["type"]] += item["content"][0]["text"]
        assert texts == {"message": wanted.content, "reasoning": wanted.reasoning}
        calls = [(one["name"], one["arguments"]) for one in found if "call_id" in one]
        assert calls == [(one.name, one.arguments) for one in wanted.calls]
        assert [item["status"] for item in found[:-1]] == ["completed"] * (len(found) - 1)
        assert found[-1]["status"] == ("incomplete" if cut else "completed")
        assert len({item["id"] for item in found}) == len(found)


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 120)), st.booleans(), st.booleans())
def test_the_stream_of_any_division_adds_up_to_the_items(text, cuts, cut, with_reader):
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(places)]
    items, events = read(parts, streamed=True, cut=cut, with_reader=with_reader)
    assert replayed(events) == items.shown()
    for streamed in (True, False):
        once, _ = read([text], streamed=streamed, cut=cut, with_reader=with_reader)
        again, _ = read(parts, streamed=streamed, cut=cut, with_reader=with_reader)
        assert plain(again.shown()) == plain(once.shown())


def test_a_call_that_breaks_off_in_a_stream_stays_incomplete():
    items, _ = read(["a ", BROKEN, " b"], streamed=True)
    first, call, last = items.shown()
    assert [first["content"][0]["text"], call["name"], call["status"]] == ["a", "add", "incomplete"]
    assert "b" in last["content"][0]["text"]
    (whole,) = read([f"a {BROKEN} b"], streamed=False)[0].shown()
    assert whole["content"][0]["text"] == f"a {BROKEN} b"


def test_log_probabilities_are_those_of_the_text():
    items = ResponseItems("resp-1", reader(), streamed=True)
    events = []
    for token in ["<think>", "Hm", ".", "</think>", "\n\n", "Se", "ven", ".", "\n", *CALL]:
        record = {"token": token, "bytes": list(token.encode())}
        events += items.push(token, 1, [record])
    events += items.finish(cut=False)
    thought, message, _ = items.shown()
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["Se", "ven", "."]
    deltas = [fields for kind, fields in events if kind == "response.output_text.delta"]
    assert [one["token"] for delta in deltas for one in delta["logprobs"]] == ["Se", "ven", "."]
    assert items.reasoning_tokens == 5
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
