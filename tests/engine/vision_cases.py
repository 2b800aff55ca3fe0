"""Requests with images for the committed checkpoints, and what transformers computed for them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baton.engine.loading.loader import Runner, load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.engine.pipeline.model import lay_out
from baton.engine.scheduling.plan import Chunk
from baton.engine.scheduling.sequence import Sequence
from baton.proto.contexts.images import ImageMetadata
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.sampling import SamplingParams

DATA = Path(__file__).resolve().parents[1] / "data" / "vision"
IMAGE = 250
GREEDY = SamplingParams(temperature=0)


@dataclass
class Case:
    prompt: np.ndarray
    grids: np.ndarray
    pixels: list[np.ndarray]
    features: list[np.ndarray]
    deep: list[np.ndarray]
    logits: np.ndarray
    greedy: list[int]
    positions: np.ndarray
    delta: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        ends, spans = 0, []
        for _, rows, columns in self.grids:
            start = ends + int(np.argmax(self.prompt[ends:] == IMAGE))
            ends = start + int(rows * columns // 4)
            spans.append((start, ends))
        return spans

    def context(self, new: int = 16, pixels=None, salt: str = "", **extra) -> TextAndVisionContext:
        shown = self.pixels if pixels is None else pixels
        return TextAndVisionContext(
            max_length=len(self.prompt) + new,
            tokens=self.prompt.astype(np.int64),
            sampling_params=GREEDY,
            vision_token_ids=[IMAGE],
            cache_salt=salt,
            images=[
                ImageMetadata(start_idx=a, end_idx=b, pixel_values=p)
                for (a, b), p in zip(self.spans, shown, strict=True)
            ],
            extra_model_args={"image_grid_thw": self.grids, **extra},
        )


def cases(name: str) -> list[Case]:
    arrays = np.load(DATA / name / "reference.npz")
    found = []
    while f"prompt_{len(found)}" in arrays:
        i = len(found)
        count = len(arrays[f"grids_{i}"])
        found.append(
            Case(
                prompt=arrays[f"prompt_{i}"],
                grids=arrays[f"grids_{i}"],
                pixels=[arrays[f"pixels_{i}_{j}"] for j in range(count)],
                features=[arrays[f"features_{i}_{j}"] for j in range(count)],
                deep=[
                    arrays[f"deep_{i}_{j}"] if f"deep_{i}_{j}" in arrays else np.zeros((0,))
                    for j in range(count)
                ],
                logits=arrays[f"logits_{i}"],
                greedy=arrays[f"greedy_{i}"].tolist(),
                positions=arrays[f"positions_{i}"],
                delta=int(arrays[f"delta_{i}"][0]),
            )
        )
    return found


def load(name: str, backend: str = "cpu", **more) -> Runner:
    settings = {"num_blocks": 256, "block_size": 4, **more}
    return load_runner(RunnerConfig(model=str(DATA / name), backend=backend, **settings))


def whole_chunk(case, context) -> Chunk:
    """The whole prompt as one chunk of a sequence with its blocks in order."""
    sequence = Sequence(b"r", context, block_size=4)
    images = sequence.images
    n = len(case.prompt)
    return Chunk(
        b"r",
        0,
        case.prompt,
        np.arange(-(-n // 4), dtype=np.int32),
        None,
        images=images.parts(0, n),
        rope_positions=images.rope_positions(0, n),
        rope_delta=images.delta,
    )


def prompt_logits(runner: Runner, case: Case) -> np.ndarray:
    """Logits of all rows of a prompt that is one chunk."""
    inputs = lay_out([whole_chunk(case, case.context())], runner.pool)
    inputs.logit_rows = np.arange(len(case.prompt), dtype=np.int32)
    return runner.pipeline.model.execute(inputs).next_token_logits
