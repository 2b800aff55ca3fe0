"""Requests with images for the committed mllama checkpoint, and what transformers computed."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pipeline.model import lay_out
from baton.engine.scheduling.plan import Chunk
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.images import ImageMetadata
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tiled_images import image_row, ratio_args
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.sampling import SamplingParams

DATA = Path(__file__).resolve().parents[1] / "data" / "vision" / "mllama"
IMAGE, TILES = 256, 4
GREEDY = SamplingParams(temperature=0)


@dataclass
class Case:
    """``prompt``: the text. ``positions``: of an image's keys and values."""

    prompt: np.ndarray
    pixels: list[np.ndarray]
    ids: list[int]
    features: np.ndarray
    logits: np.ndarray
    greedy: list[int]
    positions: int = 34
    image: int = IMAGE
    tiles: int = TILES

    def context(self, new: int = 16, pixels=None, block_size: int = 4, salt: str = "", **extra):
        """The request with the images before its text."""
        shared = {"sampling_params": GREEDY, "cache_salt": salt}
        if not self.pixels:
            text = self.prompt.astype(np.int64)
            return TextContext(max_length=len(text) + new, tokens=text, **shared)
        shown = self.pixels if pixels is None else pixels
        row, spans = image_row(self.ids, self.positions, block_size, self.image)
        tokens = np.concatenate([row, self.prompt]).astype(np.int64)
        return TextAndVisionContext(
            max_length=len(tokens) + new,
            tokens=tokens,
            vision_token_ids=[self.image],
            images=[
                ImageMetadata(start_idx=a, end_idx=b, pixel_values=p)
                for (a, b), p in zip(spans, shown, strict=True)
            ],
            extra_model_args={**ratio_args(self.ids, self.tiles), **extra},
            **shared,
        )


def cases(folder: Path = DATA) -> list[Case]:
    arrays = np.load(folder / "reference.npz")
    found = []
    while f"prompt_{len(found)}" in arrays:
        i = len(found)
        ids = arrays[f"ids_{i}"].tolist() if f"ids_{i}" in arrays else []
        found.append(
            Case(
                prompt=arrays[f"prompt_{i}"],
                pixels=[arrays[f"pixels_{i}_{j}"] for j in range(len(ids))],
                ids=ids,
                features=arrays[f"features_{i}"] if ids else np.zeros(0),
                logits=arrays[f"logits_{i}"],
                greedy=arrays[f"greedy_{i}"].tolist(),
            )
        )
    return found


def load(backend: str = "cpu", folder: Path = DATA, **more) -> Runner:
    settings = {"num_blocks": 256, "block_size": 4, **more}
    return load_runner(RunnerConfig(model=str(folder), backend=backend, **settings))


def whole_chunk(context, block_size: int = 4) -> Chunk:
    """The whole prompt as one chunk of a sequence with its blocks in order."""
    sequence = Sequence(b"r", context, block_size=block_size)
    n, images = len(context.tokens), sequence.images
    tokens, table = context.tokens.all.astype(np.int32), np.arange(-(-n // block_size))
    chunk = Chunk(b"r", 0, tokens, table.astype(np.int32))
    if images is not None:
        chunk.images, chunk.rope_delta = images.parts(0, n), images.delta
        chunk.rope_positions, chunk.seen = images.rope_positions(0, n), images.seen
    return chunk


def prompt_logits(runner: Runner, case: Case, context=None) -> np.ndarray:
    """Logits of all rows of a case's text, in one chunk."""
    context = context or case.context(block_size=runner.card.layout.block_size)
    inputs = lay_out([whole_chunk(context, runner.card.layout.block_size)], runner.pool)
    before = len(context.tokens) - len(case.prompt)
    inputs.logit_rows = np.arange(before, len(context.tokens), dtype=np.int32)
    found = runner.pipeline.model.execute(inputs).next_token_logits
    return found[:, : case.logits.shape[1]]
