"""Measure how well a recogniser understands the demo speech model.

``python -m baton.tools.demo_speech.recognise FOLDER`` prints, for the model and for espeak-ng's
own audio, how many of the ten digits PocketSphinx recognises, its word error rate over random texts
of two to six digits, and the distance of the log-mel spectra. The recogniser does not know how
many digits a text has. Needs espeak-ng and pocketsphinx, whose wheel has a model of English.

With ``--reference FILE`` it writes the log-mel spectra of espeak-ng's digits, which a test reads.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.audio.chunks import AudioDecoder, load_audio
from baton.engine.audio.pcm import pcm16
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.sampling import SamplingParams
from baton.text.speech_format import SpeechFormat
from baton.text.tokenizer import Tokenizer

from .clips import F32, SAMPLE_RATE, WORDS, digit_clips
from .mel import distance, log_mels

TEXTS = 60
SILENCE = np.zeros(SAMPLE_RATE // 5, np.float32)
NOISE = 1e-3
"""Standard deviation of the noise added for the recogniser, which expects some."""
SEARCH: dict[str, float] = {
    "wip": 1e-4,
    "silprob": 0.1,
    "beam": 1e-80,
    "wbeam": 1e-60,
    "pbeam": 1e-80,
}
"""Settings of the recogniser, chosen for espeak-ng's own audio."""


class Speaker:
    """The model in this process."""

    def __init__(self, folder: Path) -> None:
        self._engine = LLMEngine(load_runner(RunnerConfig(model=str(folder), num_blocks=512)))
        self._tokenizer = Tokenizer.from_folder(folder)
        loaded: tuple[SpeechFormat, AudioDecoder] = load_audio(folder)
        self._speech, self._audio = loaded

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the greedy tokens of each text."""
        speech = self._speech
        prompts = [
            [
                *speech.start_tokens,
                *self._tokenizer.encode(speech.prompt_text(text)),
                *speech.end_tokens,
            ]
            for text in texts
        ]
        params = SamplingParams(temperature=0, max_new_tokens=900)
        contexts = self._engine.generate(prompts, params)
        return [
            context.tokens.all[len(prompt) :].tolist()
            for context, prompt in zip(contexts, prompts, strict=True)
        ]

    def samples(self, tokens: list[int]) -> F32:
        """Return the audio of some tokens."""
        stream = self._audio.stream()
        return np.concatenate([*stream.feed(tokens), *stream.finish()])


class Recogniser:
    """PocketSphinx with grammars of one digit and of any number of digits."""

    def __init__(self) -> None:
        self._one = self._decoder("")
        self._several = self._decoder("+")

    @staticmethod
    def _decoder(repeat: str) -> Any:
        from pocketsphinx import Decoder

        with tempfile.NamedTemporaryFile("w", suffix=".gram") as file:
            file.write(
                f"#JSGF V1.0;\ngrammar digits;\npublic <digits> = ({' | '.join(WORDS)}){repeat};\n"
            )
            file.flush()
            return Decoder(samprate=SAMPLE_RATE, jsgf=file.name, loglevel="FATAL", **SEARCH)

    def words(self, samples: F32, *, one: bool = False) -> list[str]:
        """Return the recognised digits; ``one``: the audio is known to have one digit."""
        audio = np.concatenate([SILENCE, samples, SILENCE]) * (0.5 / np.abs(samples).max())
        audio = audio + np.random.default_rng(0).normal(0, NOISE, len(audio))
        decoder = self._one if one else self._several
        decoder.start_utt()
        decoder.process_raw(pcm16(audio), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return found.hypstr.split() if found else []


def word_errors(said: list[str], heard: list[str]) -> int:
    """Return the least number of changed, missing and added words (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row = row, [i]
        for j, other in enumerate(heard, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (word != other)))
    return row[-1]


def measured(
    name: str, recogniser: Recogniser, texts: list[list[int]], speak: Callable[[list[int]], F32]
) -> str:
    """Return a line with the recogniser's results for one speaker."""
    single = [recogniser.words(speak([i]), one=True) == [word] for i, word in enumerate(WORDS)]
    errors = sum(
        word_errors([WORDS[i] for i in text], recogniser.words(speak(text))) for text in texts
    )
    count = sum(map(len, texts))
    return (
        f"{name}: {sum(single)} of {len(WORDS)} digits, "
        f"word error rate {errors / count:.1%} over {count} digits in {len(texts)} texts"
    )


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description="measure the demo speech model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reference", type=Path, help="file for the log-mel spectra of the digits")
    args = parser.parse_args()
    clips = digit_clips()
    if args.reference is not None:
        spectra: dict[str, Any] = {
            word: log_mels(c).astype(np.float16) for word, c in zip(WORDS, clips, strict=True)
        }
        np.savez_compressed(args.reference, **spectra)
    speaker, recogniser = Speaker(args.folder), Recogniser()
    rng = random.Random(1)  # noqa: S311 - texts, not secrets
    texts = [rng.choices(range(len(WORDS)), k=rng.randint(2, 6)) for _ in range(TEXTS)]
    asked = [[i] for i in range(len(WORDS))] + texts
    tokens = speaker.tokens([" ".join(WORDS[i] for i in text) for text in asked])
    spoken = {tuple(t): speaker.samples(own) for t, own in zip(asked, tokens, strict=True)}
    lines = [
        measured("espeak-ng", recogniser, texts, lambda t: np.concatenate([clips[i] for i in t])),
        measured("model", recogniser, texts, lambda t: spoken[tuple(t)]),
        "distance of the log-mel spectra: "
        + ", ".join(
            f"{word} {distance(log_mels(spoken[(i,)]), log_mels(clip)):.1f} dB"
            for i, (word, clip) in enumerate(zip(WORDS, clips, strict=True))
        ),
    ]
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
