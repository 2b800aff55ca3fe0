"""Speech on the core of a decode worker: chunks of samples travel with their tokens."""

from __future__ import annotations

import pytest

from baton.decode_worker.events import ChunkDecoded, DecodeChunk
from baton.decode_worker.voice import Codec
from baton.engine.audio.chunks import AudioLayout
from baton.proto.errors import InternalError
from baton.proto.wire.messages import Abort, Aborted, Adopt, Hello, Terminal, TerminalAck, Tokens
from baton.proto.wire.wire_context import WireSampling, WireSpeechContext
from baton.worker.events import Fault, RouterUp

from ..model_cards import model_card
from .bench import KEY, LAYOUT, ROUTER, Bench, make_context, wanted

FRAME = AudioLayout(first_token=40, codebook_size=10, strides=(1,))  # one token per frame
CARD = model_card(
    architecture="LlamaForCausalLM",
    max_length=200,
    eos_token_ids=[0],
    layout=LAYOUT,
    kinds=["TextContext", "TTSContext"],
)


def speech(new=12):
    text = make_context()
    return WireSpeechContext(
        tokens=text.tokens,
        max_length=200,
        sampling=WireSampling(temperature=0.0, max_new_tokens=new),
        eos_token_ids=[0],
    )


@pytest.fixture
def speaker():
    """A bench whose chunks need one frame of context: frame 0 is complete with 2 tokens."""
    return Bench(card=CARD, codec=Codec(FRAME, 1))


def heard(bench):
    """Tokens and media since the last look, each with its position."""
    tokens, media = {}, {}
    for message in bench.take(Tokens):
        for run in message.runs:
            tokens.update({run.position + i: token for i, token in enumerate(run.tokens)})
            if run.media is not None:
                media[run.position + len(run.tokens) - 1] = run.media
    return tokens, media


def decode(bench, count=None):
    """Decode the wanted chunks; the samples of a chunk are its entries."""
    for wish in wanted(bench, DecodeChunk)[:count]:
        bench.feed(ChunkDecoded(wish.key, wish.window.first, bytes(wish.entries.tolist())))


def test_a_token_waits_for_its_chunk_and_later_ones_wait_for_it(speaker):
    speaker.run(context=speech())
    assert heard(speaker) == ({10: 42}, {})
    for token in (43, 44, 45):
        speaker.step(token)
    assert heard(speaker) == ({}, {})  # 43 completes frame 0
    (wish,) = wanted(speaker, DecodeChunk)
    assert (wish.window.first, wish.entries.tolist()) == (0, [2, 3])
    speaker.feed(ChunkDecoded((KEY, 1), 0, b"zero"))
    assert heard(speaker) == ({11: 43}, {11: b"zero"})
    decode(speaker)
    assert heard(speaker) == ({12: 44, 13: 45}, {12: bytes([2, 3, 4])})


def test_the_terminal_waits_for_the_last_chunk(speaker):
    speaker.run(context=speech(new=4))
    for token in (43, 44, 45):
        speaker.step(token)
    assert not speaker.take(Terminal)
    for _ in range(4):
        decode(speaker)
    tokens, media = heard(speaker)
    assert tokens == {10: 42, 11: 43, 12: 44, 13: 45}
    assert media == {11: bytes([2, 3]), 12: bytes([2, 3, 4]), 13: bytes([3, 4, 5])}
    terminal = speaker.one(Terminal)
    assert (terminal.status, terminal.position) == ("maximum_length", 14)
    speaker.hear(Adopt(request=KEY, position=12), "router-2")  # the first router did not receive it
    assert heard(speaker) == ({12: 44, 13: 45}, {12: media[12], 13: media[13]})
    speaker.hear(TerminalAck(requests=[(KEY, 1)]), "router-2")
    assert not speaker.member.unacknowledged


def test_a_replay_sends_only_what_the_router_lacks(speaker):
    """Its tokens have arrived with their chunks; the prefill worker has made none."""
    speaker.run(attempt=2, tokens=12, context=speech(), emitted=[42, 43, 44])
    assert heard(speaker) == ({}, {})
    speaker.step(45)
    decode(speaker)
    assert heard(speaker) == ({13: 45}, {})  # frame 3 is in the chunk of frames 2 and 3
    speaker.step(46)
    decode(speaker)
    assert heard(speaker) == ({14: 46}, {14: bytes([3, 4, 5, 6])})


def test_another_router_gets_chunks_from_before_the_takeover(speaker):
    """Its client was behind the first router, which died after a replay."""
    speaker.run(attempt=2, tokens=12, context=speech(), emitted=[42, 43, 44])
    heard(speaker)
    speaker.hear(Adopt(request=KEY, position=11), "router-2")
    decode(speaker)
    decode(speaker)
    assert heard(speaker) == ({11: 43, 12: 44}, {11: bytes([2, 3]), 12: bytes([2, 3, 4])})
    assert {router for router, message in speaker.routers if type(message) is Tokens} == {
        ROUTER, "router-2"
    }  # fmt: skip


def test_an_end_here_does_not_hide_chunks_that_were_never_made(speaker):
    """A replay from token 13 on has no chunk of token 12: another worker must make it."""
    speaker.run(attempt=2, tokens=12, context=speech(new=4), emitted=[42, 43, 44])
    speaker.step(45)
    decode(speaker)
    assert speaker.one(Terminal)
    speaker.take(Aborted)
    speaker.hear(Adopt(request=KEY, position=12), "router-2")
    assert speaker.one(Aborted).attempt == 0
    speaker.hear(Adopt(request=KEY, position=13), "router-2")
    assert speaker.one(Terminal)


def test_an_abort_during_decoding_leaves_nothing(speaker):
    speaker.run(context=speech())
    speaker.step(43)
    (wish,) = wanted(speaker, DecodeChunk)
    speaker.hear(Abort(request=KEY, attempt=1))
    speaker.feed(ChunkDecoded(wish.key, 0, b"late"))
    speaker.finish()
    assert speaker.core.idle
    assert not wanted(speaker, DecodeChunk)


def test_a_request_that_waits_for_its_last_chunk_is_listed_and_keeps_a_drain_waiting(speaker):
    speaker.run(context=speech(new=2))
    speaker.step(43)
    speaker.take(Hello)
    speaker.feed(RouterUp(ROUTER))
    (held,) = speaker.one(Hello).requests
    assert (held.position, held.done) == (12, False)
    speaker.core._drain()
    assert not speaker.core.is_drained
    decode(speaker)
    decode(speaker)
    speaker.hear(TerminalAck(requests=[(KEY, 1)]))
    assert speaker.core.is_drained


def test_a_codec_that_fails_ends_its_request(speaker):
    speaker.run(context=speech())
    speaker.step(43)
    speaker.faulty = True
    speaker.feed(ChunkDecoded((KEY, 1), 0, MemoryError("too large")))
    assert [found.event for found in speaker.other if isinstance(found, Fault)] == ["codec.failed"]
    terminal = speaker.one(Terminal)
    assert terminal.code == InternalError.code
    assert terminal.message == "the audio codec failed: MemoryError"


def test_the_deadline_ends_a_request_whose_chunk_is_late(speaker):
    speaker.run(context=speech(new=2), deadline=1.0)
    speaker.step(43)
    speaker.later(1.1)
    assert speaker.one(Terminal).code == "deadline_exceeded"
    speaker.take(Tokens)
    speaker.feed(ChunkDecoded((KEY, 1), 0, b"late"))
    assert not speaker.take(Tokens)
