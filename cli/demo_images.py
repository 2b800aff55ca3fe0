"""``baton demo --images``: questions about two generated pictures."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..client import Client
from ..deploy.config import demo_vision_model_folder
from ..deploy.demo_shapes import Thing, draw, random_things
from ..proto.contexts.pixels import encode_png
from ..proto.errors import ConfigError
from ..proto.sampling import SamplingParamsInput
from .demo_steps import KILL_TOKENS, Question, show, show_http, show_kill

SEED = 365
PICTURES = 2
HTTP_QUESTION = "What is in the picture?"
KILL_QUESTION = "Describe the picture again and again."
KILL_SAMPLING = SamplingParamsInput(temperature=0.0, max_new_tokens=KILL_TOKENS, ignore_eos=True)


class PictureTour:
    """Asks about pictures. They are in ``folder``, by default a new temporary one, as PNG files.

    ``questions``: about each picture, by default examples. Raises ConfigError if the folder
    cannot be written.
    """

    def __init__(self, folder: str | None, questions: Sequence[str]) -> None:
        rng = random.Random(SEED)  # noqa: S311 - the same pictures in each demo
        self._scenes = [random_scene(rng) for _ in range(PICTURES)]
        self._pictures = [draw(things) for things in self._scenes]
        self._questions = list(questions)
        try:
            self._folder = Path(folder or tempfile.mkdtemp(prefix="baton-pictures-")).absolute()
            self._folder.mkdir(parents=True, exist_ok=True)
            for index, picture in enumerate(self._pictures):
                self._file(index).write_bytes(encode_png(picture))
        except OSError as problem:
            raise ConfigError(f"cannot write the pictures: {problem}") from None
        print(f"pictures are in {self._folder}", flush=True)

    def __call__(self, client: Client, url: str) -> None:
        """Ask the questions; ``url``: of the gateway."""
        for index, picture in enumerate(self._pictures):
            print(f"\n--- {self._file(index)}", flush=True)
            for text in self._questions or self._examples(index):
                show(client, Question(text, picture))
        self._ask_over_http(url)
        show_kill(client, Question(KILL_QUESTION, self._pictures[-1], KILL_SAMPLING), "greedy")
        print(f"\nThe model of this demo: baton serve {demo_vision_model_folder()}", flush=True)

    def _file(self, index: int) -> Path:
        return self._folder / f"picture-{index}.png"

    def _examples(self, index: int) -> list[str]:
        colours = [thing.colour for thing in self._scenes[index]]
        shapes = [f"What shape is the {colour} object?" for colour in colours]
        return ["What is in the picture?", *shapes, "How many objects are there?"]

    def _ask_over_http(self, url: str) -> None:
        """Send the file of a picture as a data URL, from a body that is a file for ``curl``."""
        if importlib.util.find_spec("PIL") is None:
            print(
                "\nno question over HTTP: gateways decode image files with Pillow, "
                "pip install 'baton-serve[images]'",
                flush=True,
            )
            return
        content = base64.b64encode(self._file(0).read_bytes()).decode()
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
        parts = [picture, {"type": "text", "text": HTTP_QUESTION}]
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
