"""``baton demo --draw``: pictures of prompts, one of them while its decode worker is killed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..client import Client
from ..client.pictures import Picture
from ..deploy.config import demo_flux_folder
from ..proto.errors import ConfigError, InternalError
from .cluster import parsed
from .demo_steps import wait_handoff, worker_pid

PROMPTS = (
    "a blue square left of a red circle",
    "a yellow triangle above a purple square",
    "a black circle",
)
SIDE = 48
SEED = 7
STEPS = 12
KILL_STEPS = 200
"""Long enough for a kill in the middle: most of a second."""
KILL_AFTER = 60


class DrawTour:
    """Draws prompts, and writes PNG files into ``folder``, by default a new temporary one.

    ``prompts``: by default examples. Raises ConfigError if the folder cannot be made.
    """

    def __init__(self, folder: str | None, prompts: Sequence[str]) -> None:
        self._prompts = tuple(prompts) or PROMPTS
        try:
            self._folder = Path(folder or tempfile.mkdtemp(prefix="baton-drawings-")).absolute()
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(f"cannot make a folder for the pictures: {problem}") from None

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
            if done < KILL_AFTER or victims:
                return
            victim = wait_handoff(client, handoffs).decode
            pid = worker_pid(client, victim)
            os.kill(pid, signal.SIGKILL)
            victims.append(victim)
            print(f"  step {done} of {total}  SIGKILL to {victim}, pid {pid}", flush=True)

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
