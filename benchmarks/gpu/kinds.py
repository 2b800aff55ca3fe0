"""Every kind of model on one GPU: the embedded models, beside clusters on the CPU.

Text, text with images, speech, pictures: each is served by a prefill and a decode worker with
``--device cuda``, and by two workers with ``--device cpu``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...client import Client
from ...deploy.config import (
    demo_flux_folder,
    demo_model_folder,
    demo_speech_folder,
    demo_vision_model_folder,
)
from ...deploy.demo_shapes import draw, random_things
from ...proto.sampling import SamplingParamsInput
from ..served import Served
from .lines import Line, checked
from .stage import Stage

I16 = npt.NDArray[np.int16]
NEAR = 3e-2
"""Relative distance of pictures: bf16 between all kernels gives up to 1.7e-2."""
_GREEDY = SamplingParamsInput(temperature=0, max_new_tokens=60)
_TEXTS = ("What is Baton?", "What is the KV cache?", "What is 7 plus 8?")
_SPOKEN = "one two three"
_DRAWN = "a blue square left of a red circle"
_ON_CPU = ("--device=cpu",)


@dataclass(frozen=True)
class _Kind:
    name: str
    folder: Path
    flags: tuple[str, ...]
    ask: Callable[[Client], Any]
    compare: Callable[[Any, Any], tuple[bool, str, str]]
    """Whether what the GPU gave is right beside the CPU's, what was found, and the bar."""


def kinds(stage: Stage) -> Iterator[Line]:
    """One line per kind."""
    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(partial(_line, stage), _kinds())


def _line(stage: Stage, kind: _Kind) -> Line:
    given = _answer(kind, tuple(stage.flags), stage.scratch / kind.name)
    on_cpu = _answer(kind, _ON_CPU, stage.scratch / f"{kind.name}-cpu")
    right, found, bar = kind.compare(given, on_cpu)
    return checked(f"{kind.name}, beside the CPU", right, found, bar)


def _answer(kind: _Kind, flags: tuple[str, ...], place: Path) -> Any:
    place.mkdir()
    with Served(place, kind.folder, flags=(*flags, *kind.flags)) as served:
        try:
            return kind.ask(served.client)
        finally:
            log = served.log.read_text(errors="replace")[-2000:]
            print(f"-- {kind.name}, {' '.join(flags)}\n{log}", flush=True)


def _kinds() -> list[_Kind]:
    some = ("--kv-blocks=512",)
    return [
        _Kind("text", demo_model_folder(), some, _chat, _same_words),
        _Kind("images", demo_vision_model_folder(), some, _describe, _same_words),
        _Kind("speech", demo_speech_folder(), some, _speak, _same_sound),
        _Kind("pictures", demo_flux_folder(), ("--picture-memory=256MiB",), _draw, _same_picture),
    ]


def _chat(client: Client) -> list[str]:
    return [_said(client, text, []) for text in _TEXTS]


def _describe(client: Client) -> list[str]:
    rng = random.Random(365)
    pictures = [draw(random_things(rng, 2)) for _ in range(3)]
    return [_said(client, "What is in the picture?", [picture]) for picture in pictures]


def _said(client: Client, text: str, images: Sequence[Any]) -> str:
    messages = [{"role": "user", "content": text}]
    return "".join(output.text for output in client.chat(messages, _GREEDY, images=images))


def _speak(client: Client) -> I16:
    return np.concatenate([*client.speak(_SPOKEN)])


def _draw(client: Client) -> Any:
    return client.image(_DRAWN, width=48, height=48, steps=12, seed=7).pixels().astype(float)


def _same_words(given: list[str], on_cpu: list[str]) -> tuple[bool, str, str]:
    same = sum(a == b for a, b in zip(given, on_cpu, strict=True))
    said = len(on_cpu[-1].strip()) > 0
    return said and same == len(on_cpu), f"{same} of {len(on_cpu)} answers equal", "all"


def _same_sound(given: I16, on_cpu: I16) -> tuple[bool, str, str]:
    """The drawn tokens may differ where two are nearly as likely; the length says a little."""
    loud, ratio = float(given.std()), len(given) / len(on_cpu)
    same = len(given) == len(on_cpu) and int(np.abs(given.astype(int) - on_cpu).max()) <= 1
    words = f"{len(given)} samples, {len(on_cpu)} on the CPU, {'' if same else 'not '}the same"
    right = 0.7 < ratio < 1.4 and 0.5 < loud / float(on_cpu.std()) < 2
    return right, words, "as long, as loud"


def _same_picture(given: Any, on_cpu: Any) -> tuple[bool, str, str]:
    apart = float(np.linalg.norm(given - on_cpu) / np.linalg.norm(on_cpu))
    return apart < NEAR, f"{apart:.1e} apart", f"{NEAR:.0e}"
