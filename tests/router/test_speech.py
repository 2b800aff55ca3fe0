"""Speech at the router: samples are kept with their tokens, repeated with them, and charged."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.proto.layout import AudioCard
from baton.proto.wire.messages import Assign, Submitted, TokenRun, Tokens
from baton.proto.wire.wire_context import WireSampling, WireSpeechContext, WireTokens

from .conftest import CARD, Bench

AUDIO = AudioCard(sample_rate=24000, frame_samples=2048, frame_tokens=7)


def speech(new=20):
    return WireSpeechContext(
        tokens=WireTokens(np.arange(3, 13, dtype=np.int32)),
        max_length=4096,
        sampling=WireSampling(max_new_tokens=new),
    )


@pytest.fixture
def bench(make_bench) -> Bench:
    bench = make_bench()
    kinds = ["TextContext", "TTSContext"]
    card = msgspec.structs.replace(CARD, kinds=kinds, audio=AUDIO)
    bench.join("prefill", model=card)
    bench.join("decode", model=card)
    return bench


def runs(bench):
    """Position, tokens and media of all runs sent to the client since the last look."""
    found = bench.take(b"client", Tokens)
    return [(r.position, r.tokens, r.media) for message in found for r in message.runs]


def begin(bench):
    """Submit a request for speech, of which the decode worker has sent five tokens."""
    key = bench.run(context=speech())[0]
    prefill, decode = bench.workers
    prefill.tokens(key, 10, 1)
    decode.tokens(key, 11, 2)
    media = [TokenRun(key, 1, 12, [3], None, b"aa"), TokenRun(key, 1, 13, [4, 5], None, b"bb")]
    decode.say(Tokens(runs=media))
    return key, decode


def test_samples_reach_the_client_with_their_tokens(bench):
    begin(bench)
    assert runs(bench) == [
        (10, [1], None),
        (11, [2], None),
        (12, [3], b"aa"),
        (13, [4, 5], b"bb"),
    ]


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (10, [(10, [1, 2, 3], b"aa"), (13, [4, 5], b"bb")]),
        (12, [(12, [3], b"aa"), (13, [4, 5], b"bb")]),
        (13, [(13, [4, 5], b"bb")]),
        (14, [(14, [5], b"bb")]),
        (15, []),
    ],
)
def test_a_client_that_resumes_gets_the_samples_from_its_position_on(bench, position, expected):
    begin(bench)
    runs(bench)
    emitted = [1, 2, 3, 4, 5][: position - 10]
    submitted = bench.one(b"client", Submitted)
    bench.client(bench.resume_message(submitted, emitted, context=speech()))
    assert runs(bench) == expected


def test_the_time_to_the_first_samples_is_measured_once(bench):
    key = bench.run(context=speech())[0]
    prefill, decode = bench.workers
    prefill.tokens(key, 10, 1)
    for position, seconds in ((11, 0.5), (12, 1.0)):
        bench.advance(seconds)
        decode.say(Tokens(runs=[TokenRun(key, 1, position, [2], None, b"aa")]))
    metrics = bench.core.metrics
    assert metrics.first_piece_s == pytest.approx(0.5)
    assert metrics.first_piece.summary(bench.now)["count"] == 1


def test_the_new_part_of_a_repeated_run_keeps_its_samples(bench):
    key, decode = begin(bench)
    runs(bench)
    decode.say(Tokens(runs=[TokenRun(key, 1, 12, [3, 4, 5, 6], None, b"cc")]))
    assert runs(bench) == [(15, [6], b"cc")]
    decode.say(Tokens(runs=[TokenRun(key, 1, 14, [5, 6], None, b"cc")]))
    assert runs(bench) == []


def test_a_replay_has_the_tokens_whose_samples_arrived(bench):
    key, decode = begin(bench)
    bench.join("decode", 1, model=decode.hello.model)
    bench.take(bench.workers[0], Assign)
    decode.gone()
    bench.advance(2.0)
    assign = bench.take(bench.workers[0], Assign)[-1]
    assert (assign.request, assign.emitted) == (key, [1, 2, 3, 4, 5])


def test_speech_is_charged_before_any_worker_has_registered(make_bench):
    bench = make_bench()
    bench.submit("speech", context=speech(new=2100))
    assert bench.core.admission.context_bytes > 2100 * 1024


def test_all_samples_that_may_come_are_charged_and_released(bench):
    bench.run("text")
    before = bench.core.admission.context_bytes
    bench.run("speech", context=speech(new=2100))
    charged = bench.core.admission.context_bytes - before
    assert charged > 2100 * 2048 * 2 // 7 > 1 << 20
    bench.client_gone()
    bench.advance(700.0)
    assert bench.core.admission.context_bytes == 0
