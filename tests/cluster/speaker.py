"""A speech model of demo weights, its samples without a cluster, and streams of it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np

from baton.client import AsyncClient
from baton.client.model import ServedModel
from baton.client.speech import AudioPrompt, speech_context
from baton.deploy.config import demo_model_folder
from baton.engine.audio.chunks import load_audio
from baton.engine.audio.pcm import pcm16
from baton.engine.kernels.load import load_backend
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pipeline import SpeechPipeline
from baton.proto.sampling import SamplingParams

CODEC = Path(__file__).parents[1] / "data" / "codecs" / "snac"
FIRST = 260
TEXTS = [f"Once upon a time there was a {name}." for name in ("fox", "hen", "cat", "dog")]


# Of half of the texts; the two have the tokens before their texts in common.
EXAMPLE = AudioPrompt(np.random.default_rng(5).integers(0, 32, 70, np.int32), "Hi.")
VOICES = ["bob", "bob", EXAMPLE, EXAMPLE]


def speech_params(index: int, new: int = 300) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, temperature=1.0, seed=index)


def make_speaker(folder: Path) -> Path:
    """Write the demo model, with some of its tokens taken for audio tokens of the tiny codec."""
    shutil.copytree(demo_model_folder(), folder)
    shutil.copytree(CODEC, folder / "snac")
    about = {
        "first_token": FIRST, "voices": ["ada", "bob"], "end_tokens": [5], "stop_tokens": [7],
        "audio_prompt_end_tokens": [7, 6],
    }  # fmt: skip
    (folder / "speech.json").write_text(json.dumps(about))
    return folder


def samples_here(folder: Path, model: ServedModel) -> list[np.ndarray]:
    """Return the samples of each text: those of ``next_chunk`` in this process, 16 bit."""
    audio = load_audio(folder)[1]
    runner = load_runner(RunnerConfig(model=str(folder)))
    pipeline = SpeechPipeline(runner.pipeline, audio)
    expected = []
    for index, text in enumerate(TEXTS):
        context = speech_context(model, text, VOICES[index], speech_params(index))
        context.ignore_eos = True  # workers take it from the sampling parameters
        chunks = []
        while not context.is_done:
            (output,) = pipeline.next_chunk({context.request_id: context}).values()
            chunks.append(np.frombuffer(pcm16(output.audio_data), np.int16))
        assert len(chunks) > 4
        expected.append(np.concatenate(chunks))
    return expected


def speak_all(address, strike=None) -> list[np.ndarray]:
    """Speak all texts at once; ``strike`` is called after each chunk with the chunks so far."""
    chunks: list[list[np.ndarray]] = [[] for _ in TEXTS]

    async def follow(client, index):
        async for chunk in client.speak(TEXTS[index], speech_params(index), voice=VOICES[index]):
            chunks[index].append(chunk)
            if strike is not None:
                strike(chunks)

    async def body():
        async with AsyncClient(address, connect_timeout=20.0) as client:
            await asyncio.gather(*(follow(client, index) for index in range(len(TEXTS))))

    asyncio.run(body())
    return [np.concatenate(found) for found in chunks]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Compare samples: every bit, or with NumPy's kernels all but the last."""
    exact = load_backend().row_independent
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        off = np.abs(ours.astype(np.int64) - theirs)
        assert off.max() <= (0 if exact else 1)
