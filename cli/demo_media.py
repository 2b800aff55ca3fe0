"""The steps of ``baton demo`` with images, pictures and speech, one class for each."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.client import Client
from baton.client.pictures import Picture
from baton.client.speech import audio_card, no_speech, samples_of, speech_context
from baton.deploy.config import demo_flux_folder, demo_vision_model_folder
from baton.deploy.demo_shapes import Thing, draw, random_things
from baton.deploy.report import WorkerReport
from baton.engine.audio.pcm import wav_header
from baton.proto.contexts.pixels import encode_png
from baton.proto.errors import ConfigError, InternalError
from baton.proto.sampling import SamplingParamsInput

from .cluster import parsed
from .demo_steps import KILL_TOKENS, Question, kill_decode_worker, show, show_http, show_kill

I16 = npt.NDArray[np.int16]


def made_folder(folder: str | None, prefix: str) -> Path:
    """Make a folder, by default a new temporary one, and return its absolute path.

    Raises ConfigError if the folder cannot be made.
    """
    try:
        path = Path(folder or tempfile.mkdtemp(prefix=prefix)).absolute()
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        name = folder or "a temporary folder"
        raise ConfigError(f"cannot make {name}: {problem.strerror}") from None
    return path


# ------------------------------------------------------------------------------------- images


SCENE_SEED = 365
SCENES = 2
IMAGE_HTTP_QUESTION = "What is in the picture?"
IMAGE_KILL_QUESTION = "Describe the picture again and again."
GREEDY = SamplingParamsInput(temperature=0.0, max_new_tokens=KILL_TOKENS, ignore_eos=True)


class ImageTour:
    """Asks about generated images, which are PNG files in ``folder``.

    ``questions``: about each image, by default examples. Raises ConfigError if the files cannot be
    written.
    """

    def __init__(self, folder: str | None, questions: Sequence[str]) -> None:
        rng = random.Random(SCENE_SEED)  # noqa: S311 - the same images in each demo
        self._scenes = [random_scene(rng) for _ in range(SCENES)]
        self._images = [draw(things) for things in self._scenes]
        self._questions = list(questions)
        self._folder = made_folder(folder, "baton-pictures-")
        try:
            for index, image in enumerate(self._images):
                self._file(index).write_bytes(encode_png(image))
        except OSError as problem:
            raise ConfigError(f"cannot write the pictures: {problem.strerror}") from None
        print(f"pictures are in {self._folder}", flush=True)

    def __call__(self, client: Client, url: str) -> None:
        """Ask the questions; ``url``: of the gateway."""
        for index, image in enumerate(self._images):
            print(f"\n--- {self._file(index)}", flush=True)
            for text in self._questions or self._examples(index):
                show(client, Question(text, image))
        self._ask_over_http(url)
        show_kill(client, Question(IMAGE_KILL_QUESTION, self._images[-1], GREEDY), "greedy")
        print(f"\nThe model of this demo: baton serve {demo_vision_model_folder()}", flush=True)

    def _file(self, index: int) -> Path:
        return self._folder / f"picture-{index}.png"

    def _examples(self, index: int) -> list[str]:
        colours = [thing.colour for thing in self._scenes[index]]
        shapes = [f"What shape is the {colour} object?" for colour in colours]
        return ["What is in the picture?", *shapes, "How many objects are there?"]

    def _ask_over_http(self, url: str) -> None:
        """Send an image file as a data URL, from a body that is a file for ``curl``."""
        if importlib.util.find_spec("PIL") is None:
            print(
                "\nno question over HTTP: gateways decode image files with Pillow, "
                "pip install 'baton-serve[images]'",
                flush=True,
            )
            return
        content = base64.b64encode(self._file(0).read_bytes()).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
        parts = [image, {"type": "text", "text": IMAGE_HTTP_QUESTION}]
        body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
        path = self._folder / "request.json"
        path.write_text(json.dumps(body))
        show_http(url, body, f"@{path}")


def random_scene(rng: random.Random) -> tuple[Thing, ...]:
    """Return two things of different colours and shapes, so that a colour names one of them."""
    while True:
        first, second = random_things(rng, 2)
        if first.colour != second.colour and first.shape != second.shape:
            return first, second


# ----------------------------------------------------------------------------------- pictures


PROMPTS = (
    "a blue square left of a red circle",
    "a yellow triangle above a purple square",
    "a red triangle right of a green circle",
)
SIDE = 48
SEED = 7
STEPS = 12
KILL_STEPS = 200
"""Long enough for a kill in the middle: most of a second."""
KILL_AFTER = 60


class DrawTour:
    """Draws prompts, by default examples, and writes PNG files into ``folder``.

    Raises ConfigError if the folder cannot be made.
    """

    def __init__(self, folder: str | None, prompts: Sequence[str]) -> None:
        self._prompts = tuple(prompts) or PROMPTS
        self._folder = made_folder(folder, "baton-drawings-")

    def __call__(self, client: Client, _url: str) -> None:
        """Draw the pictures. Raises InternalError if the kill changes one."""
        client.model()  # fetches and loads the tokenizers, so that no picture waits for them
        for number, prompt in enumerate(self._prompts, start=1):
            self._show(client, prompt, self._folder / f"{number}.png")
        self._show_kill(client, self._prompts[0])
        print(
            f"\npictures are in {self._folder}\n"
            f"The model of this demo: baton serve {demo_flux_folder()}",
            flush=True,
        )

    def _show(self, client: Client, prompt: str, path: Path) -> None:
        """Draw a prompt, and print which workers did it."""
        began = time.monotonic()
        picture = _draw(client, prompt, STEPS)
        took = time.monotonic() - began
        self._save(picture, path)
        print(
            f"\n> {prompt}\n  {path}\n"
            f"  [{picture.prefill} encoded the prompt, {picture.decode} drew "
            f"{picture.width} x {picture.height} pixels in {STEPS} steps: {took * 1000:.0f} ms]",
            flush=True,
        )

    def _show_kill(self, client: Client, prompt: str) -> None:
        """Draw a prompt without and with a kill of the decode worker, and compare the files."""
        print(
            f"\n> {prompt}\n  ({KILL_STEPS} steps; sent twice, and the second time the decode "
            "worker is killed)",
            flush=True,
        )
        expected = _draw(client, prompt, KILL_STEPS)
        self._save(expected, self._folder / "undisturbed.png")
        print(f"  undisturbed  {len(expected.png)} bytes from {expected.decode}", flush=True)
        victims: list[str] = []
        handoffs = parsed(client.status(handoffs=0)).handoffs.count

        def kill(done: int, total: int) -> None:
            if done >= KILL_AFTER and not victims:
                moment = f"step {done} of {total}  "
                victims.append(kill_decode_worker(client, handoffs, moment).id)

        actual = client.image(
            prompt, width=SIDE, height=SIDE, steps=KILL_STEPS, seed=SEED, on_progress=kill
        )
        self._save(actual, self._folder / "killed.png")
        if victims == [actual.decode]:
            raise InternalError("the picture was finished before its decode worker was killed")
        if actual.png != expected.png:
            raise InternalError("the picture differs from the undisturbed one")
        print(
            f"  finished by {actual.decode}: all {len(actual.png)} bytes equal those of the "
            "undisturbed picture",
            flush=True,
        )

    def _save(self, picture: Picture, path: Path) -> None:
        try:
            picture.save(path)
        except OSError as problem:
            raise ConfigError(f"cannot write {path}: {problem.strerror}") from None


def _draw(client: Client, prompt: str, steps: int) -> Picture:
    return client.image(prompt, width=SIDE, height=SIDE, steps=steps, seed=SEED)


# ------------------------------------------------------------------------------------- speech


TEXTS = ("one two three", "7 0 4")
KILL_TEXT = "five nine two eight six three zero seven four one"
KILL_TRIES = 5
"""A worker may end a short text before the kill reaches it."""
RESTART_TIMEOUT = 30.0


@dataclass(slots=True, frozen=True)
class Speech:
    """Samples of one text, the decode worker of the last ones, and the seconds until they came."""

    samples: I16
    decode: str
    took: float


class SpeechTour:
    """Speaks texts, by default examples, into WAV files in ``folder``.

    Raises ConfigError if the folder cannot be made.
    """

    def __init__(self, folder: str | None, texts: Sequence[str]) -> None:
        self._texts = tuple(texts) or TEXTS
        self._folder = made_folder(folder, "baton-speech-")

    def __call__(self, client: Client, _url: str) -> None:
        """Speak the texts, then one text without and with a kill of its decode worker.

        Raises InternalError if the samples of the last two differ.
        """
        print(f"WAV files: {self._folder}", flush=True)
        for text in self._texts:
            print(f"\n> {text}", flush=True)
            name = re.sub(r"\W+", "-", text.lower()).strip("-")[:60]
            self._write(client, f"{name}.wav", _speak(client, text))
        print(
            f"\n> {KILL_TEXT}\n  (spoken twice, and the second time the decode worker is killed)",
            flush=True,
        )
        expected = _speak(client, KILL_TEXT)
        self._write(client, "undisturbed.wav", expected)
        actual = _speak_and_kill(client)
        self._write(client, "killed.wav", actual)
        if not np.array_equal(expected.samples, actual.samples):
            raise InternalError(
                f"the speech differs from the undisturbed one: {len(actual.samples)} samples "
                f"instead of {len(expected.samples)}, or other values"
            )
        print(
            f"  all {len(actual.samples)} samples equal those of the undisturbed speech", flush=True
        )

    def _write(self, client: Client, name: str, speech: Speech) -> None:
        rate = audio_card(client.model()).sample_rate
        header = wav_header(rate, speech.samples.nbytes)
        (self._folder / name).write_bytes(header + speech.samples.tobytes())
        print(
            f"  {name}: {len(speech.samples) / rate:.2f} s of speech in {speech.took:.2f} s, "
            f"from {speech.decode}",
            flush=True,
        )


def _speak(client: Client, text: str, on_chunk: Callable[[], None] | None = None) -> Speech:
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
        raise no_speech(text)
    return Speech(np.concatenate(chunks), worker, time.monotonic() - began)


def _speak_and_kill(client: Client) -> Speech:
    """Speak :data:`KILL_TEXT`, kill its decode worker after the first samples, and return all.

    Raises InternalError if the worker always ended before.
    """
    for _ in range(KILL_TRIES):
        before = parsed(client.status(handoffs=0)).handoffs.count
        victims: list[WorkerReport] = []

        def kill(before: int = before, victims: list[WorkerReport] = victims) -> None:
            if not victims:
                victims.append(kill_decode_worker(client, before))

        speech = _speak(client, KILL_TEXT, kill)
        victim = victims[0]
        if speech.decode != victim.id:
            return speech
        print(f"  {victim.id} had spoken the whole text before: again", flush=True)
        _wait_replaced(client, victim)
    raise InternalError("the speech ended before its decode worker was killed")


def _wait_replaced(client: Client, worker: WorkerReport) -> None:
    """Wait until another process is this worker. Raises InternalError after a timeout."""
    until = time.monotonic() + RESTART_TIMEOUT
    while time.monotonic() < until:
        workers = parsed(client.status(handoffs=0)).workers
        if any(w.id == worker.id and w.pid not in (0, worker.pid) for w in workers):
            return
        time.sleep(0.05)
    raise InternalError(f"{worker.id} was not restarted in {RESTART_TIMEOUT:.0f} s")
