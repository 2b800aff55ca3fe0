"""The shipped speech model: its tokens, its audio, what it skips, and that it is small."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from baton.deploy.config import demo_speech_folder
from baton.engine.audio.chunks import load_audio
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer
from baton.tools.demo_speech.clips import WORDS
from baton.tools.demo_speech.mel import distance, log_mels

FOLDER = demo_speech_folder()
REFERENCE = Path(__file__).parents[1] / "data" / "codecs" / "digits.npz"
"""Log-mel spectra of espeak-ng's digits, from tools/demo_speech/recognise.py."""
NEAR, FAR = 2.5, 4.0
"""Distances in dB: of the same digit at most, of different digits at least."""


@pytest.fixture(scope="module")
def audio():
    return load_audio(FOLDER)


@pytest.fixture(scope="module")
def speak(audio):
    """The greedy tokens for texts."""
    engine = LLMEngine(load_runner(RunnerConfig(model=str(FOLDER), num_blocks=256)))
    tokenizer, (speech, _) = Tokenizer.from_folder(FOLDER), audio

    def tokens(texts):
        prompts = [
            [*speech.start_tokens, *tokenizer.encode(speech.prompt_text(t)), *speech.end_tokens]
            for t in texts
        ]
        contexts = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=900))
        pairs = zip(contexts, prompts, strict=True)
        return [c.tokens.all[len(p) :].tolist() for c, p in pairs]

    return tokens


@pytest.fixture(scope="module")
def digits(speak, audio):
    """The tokens of the ten digits, without the end token."""
    found = speak(WORDS)
    assert {tokens[-1] for tokens in found} == set(audio[0].stop_tokens)
    return [tokens[:-1] for tokens in found]


def test_the_tokens_of_the_digits_are_the_committed_ones(digits):
    digest = hashlib.sha256(repr(digits).encode()).hexdigest()
    assert digest[:16] == "981333bd78c58dc5"


def test_texts_are_the_digits_tokens_one_after_another(speak, digits, audio):
    texts = {
        "one two three": (1, 2, 3),
        "7 0 4": (7, 0, 4),
        "704": (7, 0, 4),
        "Nine, nine; hello NINE!": (9, 9, 9),
        "0 1 2 3 4 5 6 7 8 9 1 1": (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1),
        "hello": (),
    }
    for said, wanted in zip(speak(texts), texts.values(), strict=True):
        expected = [token for digit in wanted for token in digits[digit]]
        assert said == expected + list(audio[0].stop_tokens)


def test_the_audio_is_near_the_digits_that_espeak_said(digits, audio):
    distances = np.empty((10, 10))
    with np.load(REFERENCE) as spectra:
        for row, tokens in enumerate(digits):
            stream = audio[1].stream()
            mels = log_mels(np.concatenate([*stream.feed(tokens), *stream.finish()]))
            distances[row] = [distance(mels, spectra[word].astype(np.float32)) for word in WORDS]
    assert np.diag(distances).max() < NEAR
    assert (distances + 99 * np.eye(10)).min() > FAR


def test_the_files_are_small_and_agree(audio):
    assert sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()) < 3 << 20
    assert Tokenizer.from_folder(FOLDER).vocab_size == audio[1].layout.end_token
