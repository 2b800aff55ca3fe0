"""Requests for pictures: tokens count the steps, and the terminal carries the picture."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from baton.proto.contexts.pixels import PixelContext, png_bytes
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import InputError
from baton.proto.ids import RequestID
from baton.proto.layout import KVLayout
from baton.proto.picture_requests import STATE_VOCABULARY
from baton.proto.picture_runs import committed_picture, picture_run
from baton.proto.requests import check_continued, check_wire_context, check_wire_shape
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.messages import (
    Assign,
    Cancel,
    Status,
    StatusReport,
    Submit,
    Terminal,
    TerminalAck,
    Tokens,
)
from baton.proto.wire.wire_context import WireTokens
from baton.router.admission import context_bytes

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=16)


@pytest.fixture
def draws(card):
    return msgspec.structs.replace(
        card, task="draw", kinds=["PixelContext"], layout=LAYOUT, max_length=64,
        vocab_size=STATE_VOCABULARY,
    )  # fmt: skip


def picture(prompt=5, texts=8, steps=3, **fields):
    tokens = [TokenBuffer(np.arange(count, dtype=np.int64)) for count in (prompt, texts)]
    fields = {"num_inference_steps": steps, "height": 64, "width": 32, **fields}
    return to_map(PixelContext(tokens=tokens[0], tokens_2=tokens[1], **fields))


def join(bench, draws):
    return bench.join("prefill", model=draws), bench.join("decode", model=draws)


def picture_rows(bench):
    """Work of all admitted pictures, and the work left."""
    bench.client(Status(), b"operator")
    found = msgspec.json.decode(bench.one(b"operator", StatusReport).report)["router"]
    return found["picture_rows"], found["queued_picture_rows"]


def test_a_whole_life(bench, draws):
    prefill, decode = join(bench, draws)
    key = bench.submit("r", context=picture())
    work = 3 * (64 * 32 // 256 + 8)  # steps, each with the rows of pixels and of the prompt
    assert picture_rows(bench) == (work, work)
    assign = bench.one(prefill, Assign)
    prefill.accept(assign)
    prefill.tokens(key, 5, 0)
    assert picture_rows(bench) == (work, work)  # the first token takes no step
    prefill.report(assign)
    decode.tokens(key, 5, 0)
    for step in (1, 2, 3):
        decode.tokens(key, 5 + step, step)
        assert picture_rows(bench) == (work, work - step * work // 3)
    decode.end(key, 9, status="maximum_length", media=b"png")
    assert bench.one(decode, TerminalAck).requests == [(key, 1)]
    runs = [run for one in bench.take(b"client", Tokens) for run in one.runs]
    assert [run.tokens for run in runs] == [[0], [1], [2], [3]]
    assert bench.one(b"client", Terminal).media == b"png"
    bench.ack(key)
    bench.assert_nothing_kept()
    assert picture_rows(bench) == (work, 0)
    bench.client(Status(requests=1), b"operator")
    (story,) = msgspec.json.decode(bench.one(b"operator", StatusReport).report)["requests"]
    assert (story["task"], story["new_tokens"], story["state"]) == ("draw", 4, "finished")


def test_tokens_for_the_encoders_are_queued_until_the_first_token(bench, draws):
    """Also those of a negative prompt, if it takes effect."""
    negative = TokenBuffer(np.arange(4, dtype=np.int64))
    guided = {"negative_tokens": negative, "negative_tokens_2": negative}
    prefill, _ = join(bench, draws)
    first = bench.submit("a", context=picture(texts=8, true_cfg_scale=2.0, **guided))
    bench.submit("b", context=picture(texts=8, true_cfg_scale=1.0, **guided))
    admission = bench.core.admission
    counts = lambda: (admission.encoder_tokens, admission.queued_encoder_tokens)  # noqa: E731
    assert counts() == (20, 20)
    prefill.accept(bench.take(prefill, Assign)[0])
    prefill.tokens(first, 5, 0)
    assert counts() == (20, 8)
    bench.client(Cancel(request_id="b"))
    assert counts() == (20, 0)


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
    assert (terminal.code, "without its file" in terminal.message) == ("internal", True)


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
        ({"latents": np.full((2, 2), np.nan, np.float32)}, "latents must be finite"),
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


def test_a_large_picture_weighs_more_than_small_ones(bench, draws):
    prefill, first = join(bench, draws)
    second = bench.join("decode", 1, model=draws)
    placed = []
    for name, side in (("large", 512), *((f"small-{n}", 32) for n in range(6))):
        bench.submit(name, context=picture(height=side, width=side))
        placed.append(bench.one(prefill, Assign).decode)
    (other,) = {first.endpoint, second.endpoint} - {placed[0]}
    assert placed[1:] == 6 * [other]  # together 288 rows, the large one 4128
    assert bench.core.check_integrity() is None


def test_a_picture_beyond_the_memory_of_a_decode_worker_is_refused(bench, draws):
    prefill, decode = join(bench, draws)
    small = msgspec.structs.replace(draws, max_pixels=32 * 32)
    other = bench.join("decode", 1, model=small)
    bench.submit("r", context=picture())
    terminal = bench.one(b"client", Terminal)
    said = (
        "64 x 32 are 2048 pixels, limit 1024 by the memory of the decode workers, such as 32 x 32"
    )
    assert terminal.code == "input"
    assert said in terminal.message
    bench.submit("fits", context=picture(height=32))
    assert bench.one(prefill, Assign).decode in (decode.endpoint, other.endpoint)


def test_a_decode_worker_refuses_a_picture_beyond_its_memory(draws):
    run = picture_run(picture(), RequestID("r"), LAYOUT.block_size)
    wire = grown_picture(run)
    check_continued(wire, draws)
    with pytest.raises(InputError, match="limit 1024 by the memory"):
        check_continued(wire, msgspec.structs.replace(draws, max_pixels=1024))


@pytest.mark.parametrize(
    "changed",
    [
        {"task": "generate"},
        {"log_probabilities": 2},
        {"json_schema": "{}"},
        {"extra_params": {"base": np.array([3])}},
    ],
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
    previews = picture(steps=9, extra_params={"previews": np.array([2])})
    assert context_bytes(previews) - context_bytes(picture(steps=9)) > 2 * png_bytes(256, 256)


_ODD = [
    np.zeros(0, np.int32),
    np.array(3, np.int32),
    np.zeros((2, 3), np.int32),
    np.array([1.5], np.float32),
    np.array([True, False]),
    np.array([-(1 << 40), 1 << 40], np.int64),
    np.array([1 << 63], np.uint64),
    np.array([np.nan], np.float64),
    np.arange(1025, dtype=np.int32),
]


def _odd_fields(rng):
    """Some fields of a request, each with a value that a decoder accepts."""
    arrays = [None, *_ODD]
    prompts = [None, *map(WireTokens, _ODD), picture().tokens_2]
    numbers = [0, 1, 16, 64, 250, 251, 4096, 1 << 40]
    floats = [0.0, 1.0, 1.5, -1.0, 1e6, float("nan"), float("inf")]
    pools = {
        **dict.fromkeys(("mask", "timesteps", "sigmas", "latents", "guidance"), arrays),
        **dict.fromkeys(("tokens_2", "negative_tokens", "negative_tokens_2"), prompts),
        **dict.fromkeys(("height", "width", "num_inference_steps"), numbers),
        **dict.fromkeys(("guidance_scale", "true_cfg_scale"), floats),
        "extra_params": [
            {},
            *({name: one} for name in ("seed", "base") for one in _ODD),
            {"other": _ODD[0]},
        ],
        "num_images_per_prompt": [0, 1, 2],
    }
    names = rng.choice(sorted(pools), int(rng.integers(1, 5)), replace=False)
    return {str(name): pools[str(name)][rng.integers(len(pools[str(name)]))] for name in names}


def test_any_fields_give_an_input_error_or_a_row(draws):
    """What the checks accept, a worker can run; nothing raises another error."""
    rng = np.random.default_rng(11)
    accepted = 0
    for _ in range(4000):
        wire = msgspec.structs.replace(picture(), **_odd_fields(rng))
        try:
            check_wire_shape(wire)
            check_wire_context(wire, draws)
        except InputError:
            continue
        run = picture_run(wire, RequestID("r"), LAYOUT.block_size)
        check_continued(grown_picture(run), draws)
        accepted += 1
    assert 100 < accepted < 3000


def grown_picture(run):
    run.update(0)
    return committed_picture(run)
