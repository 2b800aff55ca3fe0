"""A picture model in one process: both halves on each of the host's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.engine.kernels.load import load_backend
from baton.engine.pictures.folder import open_folder
from baton.engine.pictures.pipeline import Denoiser, Drawing, PromptEncoder
from baton.proto.contexts.pixels import PixelContext


def backends() -> list[str]:
    """Names of the kernels that this installation has."""
    try:
        load_backend("cpu")
    except ImportError:
        return ["numpy"]
    return ["numpy", "cpu"]


@dataclass
class Loaded:
    encoder: PromptEncoder
    denoiser: Denoiser


def load(backend: str, folder: Path) -> Loaded:
    opened, kernels = open_folder(folder), load_backend(backend)
    return Loaded(PromptEncoder(opened, kernels), Denoiser(opened, kernels))


def draw(loaded: Loaded, context: PixelContext) -> Drawing:
    """Compute all steps of a request."""
    drawing = loaded.denoiser.start(context, loaded.encoder.encode(context))
    while not drawing.is_done:
        loaded.denoiser.step([drawing])
    return drawing
