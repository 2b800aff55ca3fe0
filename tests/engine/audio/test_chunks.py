"""Audio tokens, chunk borders and windows, beside the snac package's results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from baton.engine.audio.chunks import (
    LONGEST_CHUNK,
    AudioDecoder,
    AudioLayout,
    chunk_end,
    load_audio,
    next_window,
    read_layout,
)
from baton.engine.audio.snac import SnacDecoder
from baton.engine.kernels.load import load_backend
from baton.proto.errors import CheckpointError

FOLDER = Path(__file__).resolve().parents[2] / "data" / "codecs" / "snac"
FRAMES = 30
LAYOUT = AudioLayout(16, 32, (4, 2, 1))


@pytest.fixture(scope="module")
def reference():
    return np.load(FOLDER / "reference.npz")


@pytest.fixture(scope="module")
def audio():
    return AudioDecoder(SnacDecoder(FOLDER, load_backend()), 16)


def flat(reference):
    """The reference's entries in the order of tokens: coarse, middle, fine, fine, middle, ..."""
    a, b, c = (reference[f"entries_{i}"] for i in range(3))
    columns = [a, b[::2], c[::4], c[1::4], b[1::2], c[2::4], c[3::4]]
    return np.stack(columns, axis=1).ravel()


def test_the_slots_are_those_of_orpheus():
    assert LAYOUT.slots == (0, 1, 2, 2, 1, 2, 2)
    assert AudioLayout(0, 1, (8, 4, 2, 1)).slots == (0, 1, 2, 3, 3, 2, 3, 3, 1, 2, 3, 3, 2, 3, 3)
    assert LAYOUT.frame_tokens == 7


def test_tokens_become_entries():
    """A token is ``first_token + 32 * slot + entry``; other tokens do not count."""
    entries = np.arange(14, dtype=np.int32)
    tokens = 16 + 32 * (np.arange(14) % 7) + entries
    assert LAYOUT.entries(tokens).tolist() == entries.tolist()
    assert LAYOUT.end_token == 16 + 7 * 32
    mixed = np.concatenate([[3, 15], tokens[:3], [LAYOUT.end_token, 9999], tokens[3:]])
    assert LAYOUT.entries(mixed).tolist() == entries.tolist()


def test_entries_are_split_by_codebook(reference):
    split = LAYOUT.by_codebook(flat(reference))
    for book in range(3):
        assert np.array_equal(split[book], reference[f"entries_{book}"])
    assert np.array_equal(LAYOUT.interleaved(split), flat(reference))


def test_chunks_grow_from_one_frame_to_sixteen():
    ends, first = [], 0
    while first < 100:
        ends.append(chunk_end(first))
        first = ends[-1]
    assert ends == [1, 2, 4, 6, 10, 14, 22, 30, 46, 62, 78, 94, 110]
    for frame in range(110):
        assert chunk_end(frame) == min(end for end in ends if end > frame)
    assert max(np.diff(ends)) == LONGEST_CHUNK


def test_a_window_waits_for_its_context():
    assert next_window(0, 3, 3, ended=False) is None
    assert next_window(0, 4, 3, ended=False) == (0, 1, 0, 4)
    assert next_window(30, 48, 3, ended=False) is None
    assert next_window(30, 49, 3, ended=False) == (30, 46, 27, 49)
    assert next_window(30, 60, 3, ended=False) == (30, 46, 27, 49)


def test_the_end_cuts_the_last_windows():
    assert next_window(0, 2, 3, ended=True) == (0, 1, 0, 2)
    assert next_window(1, 2, 3, ended=True) == (1, 2, 0, 2)
    assert next_window(2, 2, 3, ended=True) is None
    assert next_window(30, 35, 3, ended=True) == (30, 35, 27, 35)
    assert next_window(0, 0, 3, ended=True) is None


def stream(audio, entries, first=0, step=7):
    """Decode as tokens arrive, ``step`` at a time; return the chunks."""
    chunks = []
    for count in [*range(step, len(entries), step), len(entries)]:
        while window := audio.next_window(first, count, ended=count == len(entries)):
            size = audio.layout.frame_tokens
            chunks.append(audio.decode(window, entries[window.start * size : window.stop * size]))
            first = window.end
    return chunks


@pytest.mark.parametrize("step", [1, 7, 40, 210])
def test_the_stream_is_the_packages_audio(audio, reference, step):
    """A window that is off by a frame gives other samples: see the next test."""
    samples = np.concatenate(stream(audio, flat(reference), step=step))
    np.testing.assert_allclose(samples, reference["audio"], atol=2e-6)
    if audio.codec.backend.row_independent:
        whole = audio.codec.decode(LAYOUT.by_codebook(flat(reference)))
        assert np.array_equal(samples, whole)


@pytest.mark.parametrize("first", [1, 5, 14, 29])
def test_a_stream_may_begin_at_any_frame(audio, reference, first):
    """The samples are those of a stream from the start, so a replay repeats none."""
    samples = np.concatenate(stream(audio, flat(reference), first))
    np.testing.assert_allclose(samples, reference["audio"][first * 96 :], atol=2e-6)


def test_tokens_after_a_rest_of_a_frame_are_not_decoded(audio, reference):
    chunks = stream(audio, flat(reference)[: 7 * 4 + 5])
    assert sum(map(len, chunks)) == 4 * 96


def write(folder, **fields):
    (folder / "speech.json").write_text(json.dumps(fields))


def test_a_folder_is_loaded(tmp_path):
    (tmp_path / "voicebox").symlink_to(FOLDER)
    write(tmp_path, first_token=16, codec="voicebox", voices=["ada"])
    speech, audio = load_audio(tmp_path)
    assert speech.voices == ("ada",)
    assert (audio.sample_rate, audio.layout) == (8000, LAYOUT)


def test_a_folder_without_codec_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"speech\.json"):
        load_audio(tmp_path)
    write(tmp_path, first_token=16)
    with pytest.raises(CheckpointError, match=r"snac/config\.json"):
        load_audio(tmp_path)


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_a_token_stream_gives_the_same_samples(audio, reference, step):
    """Also with tokens of text between; only the context is kept."""
    entries = flat(reference)
    tokens = 16 + 32 * (np.arange(len(entries)) % 7) + entries
    tokens = np.insert(tokens, [5, 90], [3, 999]).tolist()
    stream, chunks = audio.stream(), []
    for at in range(0, len(tokens), step):
        chunks += stream.feed(tokens[at : at + step])
    chunks += stream.finish()
    np.testing.assert_allclose(np.concatenate(chunks), reference["audio"], atol=2e-6)
    assert list(stream.finish()) == []


def test_a_layout_is_read_without_weights(tmp_path):
    assert read_layout(tmp_path) is None
    write(tmp_path, first_token=16)
    (tmp_path / "snac").mkdir()
    with pytest.raises(CheckpointError, match=r"snac/config\.json"):
        read_layout(tmp_path)
    (tmp_path / "snac" / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    layout, config = read_layout(tmp_path)
    assert layout == LAYOUT
    assert (config.sampling_rate, config.frame_samples) == (8000, 96)
    layout.check(240)
    with pytest.raises(CheckpointError, match="240, after the model's vocabulary of 239"):
        layout.check(239)
