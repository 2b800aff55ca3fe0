"""Which run carries which chunk of samples, whatever the order in which chunks are decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.decode_worker.voice import Codec, Voice
from baton.engine.audio.chunks import AudioDecoder, AudioLayout, Window, next_window
from baton.engine.audio.pcm import pcm16
from baton.engine.audio.snac import SnacDecoder
from baton.engine.kernels.load import load_backend

SNAC = Path(__file__).parents[1] / "data" / "codecs" / "snac"

LAYOUT = AudioLayout(first_token=100, codebook_size=10, strides=(4, 2, 1))
CODEC = Codec(LAYOUT, reach=3)
FIRST = 20
KEY = (b"request", 1)
END = "maximum_length"


def stream(count, seed=0):
    """Return tokens, not all of them audio."""
    rng = np.random.default_rng(seed)
    return [int(t) for t in np.where(rng.random(count) < 0.1, 5, rng.integers(100, 170, count))]


def samples(entries):
    """Return bytes that show the entries of a window."""
    return bytes(entries.tolist())


def expected(tokens):
    """Return the chunk of each position, by the windows of :func:`next_window`."""
    first, found = 0, {}
    for count in range(1, len(tokens) + 1):
        entries = LAYOUT.entries(np.array(tokens[:count]))
        ended = count == len(tokens)
        while window := next_window(first, len(entries) // 7, CODEC.reach, ended=ended):
            chunk = samples(entries[window.start * 7 : window.stop * 7])
            at = FIRST + count - 1
            found[at] = found.get(at, b"") + chunk
            first = window.end
    return found


class Reader:
    """Takes runs as a router does: only at the next position."""

    def __init__(self, position=FIRST):
        self.next = position
        self.tokens, self.media = [], {}

    def take(self, runs):
        for run in runs:
            assert run.position == self.next
            self.tokens += run.tokens
            self.next += len(run.tokens)
            if run.media is not None:
                self.media[self.next - 1] = run.media


def pump(voice, reader, late=None):
    """Send and decode until nothing is left; with ``late``, chunks wait there instead."""
    while True:
        runs, window = voice.advance(KEY, ())
        reader.take(runs)
        if window is None:
            return
        if late is not None:
            late.append(window)
            return
        voice.made(window.first, samples(voice.entries(window)))


def feed(voice, tokens, reader):
    """Add tokens one by one; the end comes with the last one, as from the engine."""
    for at, token in enumerate(tokens):
        voice.add(token)
        voice.status = END if at == len(tokens) - 1 else None
        pump(voice, reader)
    assert voice.is_over


@pytest.mark.parametrize("count", [2, 6, 7, 8, 27, 28, 29, 60, 200, 500])
def test_each_chunk_comes_with_the_token_that_completes_it(count):
    tokens = stream(count)
    voice, reader = Voice(CODEC, FIRST, tokens[:1]), Reader()
    pump(voice, reader)
    feed(voice, tokens[1:], reader)
    assert reader.tokens == tokens
    assert reader.media == expected(tokens)


def test_a_chunk_whose_frames_are_just_complete_does_not_wait_for_the_end():
    """At the end of the stream, the first chunk has just the frames that it needs."""
    audio = [101, 111, 121, 131, 141, 151, 161] * (1 + CODEC.reach)
    tokens = [*audio, 5, 5]
    voice, reader = Voice(CODEC, FIRST, tokens), Reader()
    voice.seek(FIRST)
    voice.status = END
    pump(voice, reader)
    assert (reader.tokens, reader.media) == (tokens, expected(tokens))
    assert min(reader.media) == FIRST + len(audio) - 1


def test_tokens_before_the_completing_one_do_not_wait_for_the_codec():
    tokens = stream(200)
    voice, reader, late = Voice(CODEC, FIRST, tokens[:1]), Reader(), []
    for token in tokens[1:]:
        voice.add(token)
        pump(voice, reader, late)
    (window,) = late  # one chunk at a time
    assert window.first == 0
    assert reader.next == min(expected(tokens))
    assert reader.media == {}
    voice.status = END
    assert not voice.is_over
    voice.made(0, samples(voice.entries(window)))
    pump(voice, reader)
    assert voice.is_over
    assert (reader.tokens, reader.media) == (tokens, expected(tokens))


@pytest.mark.parametrize("taken", [1, 2, 27, 28, 29, 36, 90, 150, 199])
def test_another_worker_continues_with_the_same_chunks(taken):
    """A replay has ``taken`` tokens, which the router has with their chunks."""
    tokens = stream(200)
    voice = Voice(CODEC, FIRST, tokens[:taken])
    reader = Reader(FIRST if taken == 1 else FIRST + taken)
    pump(voice, reader)
    feed(voice, tokens[taken:], reader)
    missing = {at: chunk for at, chunk in expected(tokens).items() if at >= FIRST + taken}
    assert reader.media == missing


@pytest.mark.parametrize("back", [0, 20, 28, 29, 60, 119, 120, 500])
@pytest.mark.parametrize("waits", [False, True])
def test_a_router_gets_all_from_its_position_on(back, waits):
    """Also chunks from before the takeover, which this worker has not decoded yet."""
    tokens = stream(200)
    voice, reader, late = Voice(CODEC, FIRST, tokens[:60]), Reader(FIRST + 60), []
    for token in tokens[60:120]:
        voice.add(token)
        pump(voice, reader, late if waits else None)
    sent = voice.sent
    voice.seek(back)
    other = Reader(voice.sent)
    assert other.next == min(max(back, FIRST), FIRST + 120)
    pump(voice, other)
    for window in late:
        voice.made(window.first, samples(voice.entries(window)))
    feed(voice, tokens[120:], other)
    begun = min(max(back, FIRST), FIRST + 120)
    every = {at: chunk for at, chunk in expected(tokens).items() if at >= begun}
    assert (other.tokens, other.media) == (tokens[begun - FIRST :], every)
    kept, media = voice.kept()
    oldest = begun if begun > sent else min(begun, FIRST + 60)
    assert voice.oldest == oldest
    assert kept == tokens[oldest - FIRST :]
    assert media == {at: c for at, c in expected(tokens).items() if at >= oldest}


def test_a_stream_without_audio_has_no_chunks():
    voice, reader = Voice(CODEC, FIRST, [5]), Reader()
    feed(voice, [5] * 40, reader)
    assert (reader.tokens, reader.media) == ([5] * 41, {})


# ------------------------------------------------------------------ with a codec


@pytest.fixture(scope="module")
def audio():
    return AudioDecoder(SnacDecoder(SNAC, load_backend()), 100)


def spoken(audio, tokens, reach, planted=lambda window: window):
    """Return the samples that a worker streams; ``planted`` changes each window."""
    codec = Codec(audio.layout, reach)
    voice, media = Voice(codec, FIRST, tokens[:1]), []
    for at, token in enumerate(tokens[1:], 2):
        voice.add(token)
        voice.status = END if at == len(tokens) else None
        while True:
            runs, window = voice.advance(KEY, ())
            media += [run.media for run in runs if run.media]
            if window is None:
                break
            wrong = planted(window)
            voice.made(window.first, pcm16(audio.decode(wrong, voice.entries(wrong))))
    return np.frombuffer(b"".join(media), "<i2").astype(np.int64)


def test_the_stream_is_the_audio_of_all_tokens(audio):
    tokens = (100 + np.random.default_rng(3).integers(0, 7 * 32, 7 * 30 + 4)).tolist()
    stream = audio.stream()
    whole = np.concatenate([*stream.feed(tokens), *stream.finish()])
    reach = audio.codec.context_frames
    exact = spoken(audio, tokens, reach)
    assert len(exact) == 30 * 96
    expected = np.frombuffer(pcm16(whole), "<i2")
    tolerance = 0 if audio.codec.backend.row_independent else 1
    assert np.abs(exact - expected).max() <= tolerance


def late(window):
    return Window(
        window.first, window.end, window.start + (window.start < window.first), window.stop
    )


def early(window):
    return Window(window.first, window.end, window.start, max(window.end, window.stop - 1))


def shifted(window):
    first, end, start, stop = window
    return window if start == 0 else Window(first - 1, end - 1, start - 1, stop - 1)


@pytest.mark.parametrize("planted", [late, early, shifted])
def test_a_window_off_by_one_frame_changes_samples(audio, planted):
    """The comparison above is sharp enough: the outermost frame changes the last bit of 16."""
    if not audio.codec.backend.row_independent:
        pytest.skip("these kernels differ by as much")
    tokens = (100 + np.random.default_rng(3).integers(0, 7 * 32, 7 * 30 + 4)).tolist()
    reach = audio.codec.context_frames
    exact = spoken(audio, tokens, reach)
    wrong = spoken(audio, tokens, reach, planted)
    assert len(exact) == len(wrong)
    assert np.abs(exact - wrong).max() > 0


def test_a_reach_of_one_frame_too_few_changes_samples(audio):
    tokens = (100 + np.random.default_rng(3).integers(0, 7 * 32, 7 * 30 + 4)).tolist()
    reach = audio.codec.context_frames
    assert np.abs(spoken(audio, tokens, reach) - spoken(audio, tokens, reach - 1)).max() > 1
