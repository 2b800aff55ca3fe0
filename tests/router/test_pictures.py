"""Requests for pictures: tokens count the steps, and the terminal carries the picture."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from baton.proto.contexts.pixels import PixelContext, png_bytes
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.layout import KVLayout
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.messages import Assign, Submit, Terminal, TerminalAck, Tokens
from baton.router.requests import context_bytes

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16)


@pytest.fixture
def draws(card):
    return msgspec.structs.replace(
        card, task="draw", kinds=["PixelContext"], layout=LAYOUT, max_length=64
    )


def picture(prompt=5, texts=8, steps=3, **fields):
    tokens = [TokenBuffer(np.arange(count, dtype=np.int64)) for count in (prompt, texts)]
    fields = {"num_inference_steps": steps, "height": 64, "width": 32, **fields}
    return to_map(PixelContext(tokens=tokens[0], tokens_2=tokens[1], **fields))


def join(bench, draws):
    return bench.join("prefill", model=draws), bench.join("decode", model=draws)


def test_a_whole_life(bench, draws):
    prefill, decode = join(bench, draws)
    key = bench.submit("r", context=picture())
    assign = bench.one(prefill, Assign)
    prefill.accept(assign)
    prefill.tokens(key, 5, 0)
    prefill.report(assign)
    decode.tokens(key, 5, 0)
    for step in (1, 2, 3):
        decode.tokens(key, 5 + step, step)
    decode.end(key, 9, status="maximum_length", media=b"png")
    assert bench.one(decode, TerminalAck).requests == [(key, 1)]
    runs = [run for one in bench.take(b"client", Tokens) for run in one.runs]
    assert [run.tokens for run in runs] == [[0], [1], [2], [3]]
    assert bench.one(b"client", Terminal).media == b"png"
    bench.ack(key)
    bench.assert_nothing_kept()


def test_a_picture_waits_for_the_client(bench, draws):
    prefill, decode = join(bench, draws)
    key = bench.submit("r", context=picture())
    prefill.accept(assign := bench.one(prefill, Assign))
    prefill.report(assign)
    decode.tokens(key, 5, 0, 1, 2, 3)
    decode.end(key, 9, media=b"png")
    bench.client(Submit(request_id="r", context=picture()))  # as if the answer was lost
    assert {t.media for t in bench.terminals(key)} == {b"png"}
    bench.ack(key)
    bench.assert_nothing_kept()


def test_an_end_without_a_picture_is_an_error(bench, draws):
    prefill, decode = join(bench, draws)
    key = bench.submit("r", context=picture())
    prefill.accept(assign := bench.one(prefill, Assign))
    prefill.report(assign)
    decode.tokens(key, 5, 0, 1, 2, 3)
    decode.end(key, 9)
    terminal = bench.one(b"client", Terminal)
    assert (terminal.code, "without a picture" in terminal.message) == ("internal", True)


def test_a_replay_may_repeat_all_steps(bench, draws):
    """The second attempt computes every step again; the client gets each of them once."""
    prefill, decode = join(bench, draws)
    key = bench.submit("r", context=picture())
    prefill.accept(assign := bench.one(prefill, Assign))
    prefill.report(assign)
    decode.tokens(key, 5, 0, 1, 2)
    decode.gone()
    other = bench.join("decode", 1, model=draws)
    assign = bench.take(prefill, Assign)[-1]
    assert (assign.attempt, assign.emitted, assign.decode) == (2, [0, 1, 2], other.endpoint)
    prefill.accept(assign)
    prefill.tokens(key, 5, 0, attempt=2)
    prefill.report(assign)
    for step in range(4):
        other.tokens(key, 5 + step, step, attempt=2)
    other.end(key, 9, attempt=2, media=b"png")
    runs = [run for one in bench.take(b"client", Tokens) for run in one.runs]
    assert [token for run in runs for token in run.tokens] == [0, 1, 2, 3]
    assert bench.one(b"client", Terminal).media == b"png"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"height": 8}, "height must be"),
        ({"steps": 0}, "num_inference_steps must be"),
        ({"steps": 10**6}, "num_inference_steps must be"),
        ({"texts": 60}, "need .* positions of KV memory, limit 64"),
        ({"extra_params": {"seed": np.zeros(2)}}, "seed must be"),
        ({"latents": np.full((2, 2), np.nan, np.float32)}, "not finite"),
        ({"tokens_2": None}, "tokens_2 are missing"),
    ],
)
def test_wrong_requests_are_refused_at_once(bench, draws, fields, message):
    prefill, _ = join(bench, draws)
    wire = picture(**{name: fields[name] for name in fields if name != "tokens_2"})
    if "tokens_2" in fields:
        wire = msgspec.structs.replace(wire, tokens_2=None)
    bench.submit("r", context=wire)
    terminal = bench.one(b"client", Terminal)
    assert terminal.code == "input"
    assert re.search(message, terminal.message)
    assert not bench.take(prefill, Assign)


@pytest.mark.parametrize(
    "changed",
    [{"task": "generate"}, {"log_probabilities": 2}, {"json_schema": "{}"}, {"base": 3}],
)
def test_fields_of_other_requests_are_refused(bench, draws, changed):
    join(bench, draws)
    bench.submit("r", context=msgspec.structs.replace(picture(), **changed))
    assert bench.one(b"client", Terminal).code in ("input", "task_mismatch")


def test_text_for_a_picture_model(bench, draws):
    join(bench, draws)
    bench.submit("r")
    assert "takes no text" in bench.one(b"client", Terminal).message


def test_a_picture_from_a_text_model(bench):
    bench.pair()
    bench.submit("r", context=picture())
    assert "takes no requests for pictures" in bench.one(b"client", Terminal).message


def test_the_picture_is_charged():
    small, large = picture(), picture(height=2048, width=2048)
    assert context_bytes(large) - context_bytes(small) == png_bytes(2048, 2048) - png_bytes(64, 32)
    assert context_bytes(large) > 12 << 20
