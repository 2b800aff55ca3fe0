"""``baton demo --speech``: speak digits into WAV files, also while a decode worker is killed."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..client import Client
from ..client.speech import audio_card, samples_of, speech_context
from ..engine.audio.pcm import wav_header
from ..proto.errors import ConfigError, InternalError
from .cluster import parsed
from .demo_steps import wait_handoff

TEXTS = ("one two three", "7 0 4")
KILL_TEXT = "five nine two eight six three zero seven four one"
KILL_TRIES = 5
"""A worker may end a short text before the kill reaches it."""
RESTART_TIMEOUT = 30.0

I16 = npt.NDArray[np.int16]


@dataclass(slots=True, frozen=True)
class Speech:
    """Samples of one text, the decode worker of the last ones, and the seconds until they came."""

    samples: I16
    decode: str
    took: float


class SpeechTour:
    """Speaks texts into WAV files of a folder; ``folder`` None: a new temporary one.

    Raises ConfigError if the folder cannot be made.
    """

    def __init__(self, folder: str | None, texts: tuple[str, ...]) -> None:
        self._texts = texts or TEXTS
        self._folder = folder
        if folder is not None:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as problem:
                raise ConfigError(f"cannot make {folder}: {problem.strerror}") from None

    def __call__(self, client: Client, url: str) -> None:
        """Speak the texts, then one text without and with a kill of its decode worker.

        Raises InternalError if the samples of the last two differ.
        """
        folder = Path(self._folder or tempfile.mkdtemp(prefix="baton-speech-"))
        print(f"WAV files: {folder}", flush=True)
        for text in self._texts:
            print(f"\n> {text}", flush=True)
            speech = speak(client, text)
            self._write(client, folder / file_name(text), speech)
        print(
            f"\n> {KILL_TEXT}\n  (spoken twice, and the second time the decode worker is killed)",
            flush=True,
        )
        expected = speak(client, KILL_TEXT)
        self._write(client, folder / "undisturbed.wav", expected)
        actual = speak_and_kill(client)
        self._write(client, folder / "killed.wav", actual)
        print(f"  {compare(expected.samples, actual.samples)}", flush=True)

    def _write(self, client: Client, path: Path, speech: Speech) -> None:
        rate = audio_card(client.model()).sample_rate
        path.write_bytes(wav_header(rate, speech.samples.nbytes) + speech.samples.tobytes())
        print(
            f"  {path.name}: {len(speech.samples) / rate:.2f} s of speech in {speech.took:.2f} s, "
            f"from {speech.decode}",
            flush=True,
        )


def file_name(text: str) -> str:
    """Return the name of the WAV file for a text."""
    return re.sub(r"\W+", "-", text.lower()).strip("-")[:60] + ".wav"


def speak(client: Client, text: str, on_chunk: Callable[[], None] | None = None) -> Speech:
    """Speak a text. ``on_chunk`` is called after each chunk of samples."""
    began = time.monotonic()
    context = speech_context(client.model(), text, None, None)
    chunks, worker = [], ""
    with closing(client.generate(context)) as outputs:
        for output in outputs:
            worker = output.decode or worker
            if output.media:
                chunks.append(samples_of(output.media))
                if on_chunk is not None:
                    on_chunk()
    if not chunks:
        raise InternalError(f"the model said nothing for {text[:80]!r}")
    return Speech(np.concatenate(chunks), worker, time.monotonic() - began)


def speak_and_kill(client: Client) -> Speech:
    """Speak :data:`KILL_TEXT`, kill its decode worker after the first samples, and return all.

    Raises InternalError if the worker always ended before.
    """
    for _ in range(KILL_TRIES):
        before = parsed(client.status(handoffs=0)).handoffs.count
        pids = decode_pids(client)
        victims: list[str] = []

        def kill(
            before: int = before, pids: dict[str, int] = pids, victims: list[str] = victims
        ) -> None:
            if not victims:
                victims.append(wait_handoff(client, before).decode)
                os.kill(pids[victims[0]], signal.SIGKILL)
                print(f"  SIGKILL to {victims[0]}, pid {pids[victims[0]]}", flush=True)

        speech = speak(client, KILL_TEXT, kill)
        victim = victims[0]
        if speech.decode != victim:
            return speech
        print(f"  {victim} had spoken the whole text before: again", flush=True)
        wait_replaced(client, victim, pids[victim])
    raise InternalError("the speech ended before its decode worker was killed")


def decode_pids(client: Client) -> dict[str, int]:
    """Return the process ids of the decode workers; kill(0) would hit this process."""
    workers = parsed(client.status(handoffs=0)).of_role("decode")
    return {worker.id: worker.pid for worker in workers if worker.pid > 0}


def wait_replaced(client: Client, worker: str, pid: int) -> None:
    """Wait until another process is ``worker``. Raises InternalError after a timeout."""
    until = time.monotonic() + RESTART_TIMEOUT
    while decode_pids(client).get(worker, pid) == pid:
        if time.monotonic() > until:
            raise InternalError(f"{worker} was not restarted in {RESTART_TIMEOUT:.0f} s")
        time.sleep(0.05)


def compare(expected: I16, actual: I16) -> str:
    """Return a sentence for equal samples. Raises InternalError for different ones."""
    if np.array_equal(expected, actual):
        return f"all {len(actual)} samples equal those of the undisturbed speech"
    raise InternalError(
        f"the speech differs from the undisturbed one: {len(actual)} samples instead of "
        f"{len(expected)}, or other values"
    )
