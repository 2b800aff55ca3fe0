"""Count right pictures of the demo Flux model: ``python -m baton.tools.demo_flux.score [FOLDER]``.

It draws random scenes, each with another seed, and reads colours, shapes and places back from the
pixels. It needs no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from baton.deploy.config import demo_flux_folder
from baton.engine.pictures.draw import PictureEngine

from .scenes import SIDE, Scene, all_scenes, is_held_out, read, shows

FIRST_SEED = 1_000_000


def pools() -> dict[str, list[Scene]]:
    """Return the scenes by what the training saw of them; it saw no picture of any seed."""
    scenes = all_scenes()
    two = [(index, scene) for index, scene in enumerate(scenes) if scene.second]
    return {
        "one thing": [scene for scene in scenes if not scene.second],
        "two things": [scene for index, scene in two if not is_held_out(index)],
        "two things, prompt not trained": [scene for index, scene in two if is_held_out(index)],
    }


def wrong_pictures(
    engine: PictureEngine, scenes: Sequence[Scene], steps: int
) -> list[tuple[Scene, Scene | None]]:
    """Draw every scene, and return the wrong ones with what their pictures show."""
    wrong = []
    for number, scene in enumerate(scenes):
        request = engine.request(
            scene.prompt,
            seed=FIRST_SEED + number,
            height=SIDE,
            width=SIDE,
            num_inference_steps=steps,
        )
        picture = engine.draw(request)
        if not shows(picture, scene):
            wrong.append((scene, read(picture)))
    return wrong


def main() -> None:
    """Parse the command line, draw and print the counts."""
    parser = argparse.ArgumentParser(description="count right pictures of the demo Flux model")
    parser.add_argument("folder", nargs="?", default=demo_flux_folder())
    parser.add_argument("--pictures", type=int, default=200, help="per kind of scene")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    args = parser.parse_args()
    engine = PictureEngine(args.folder, prompt_tokens=args.prompt_tokens)
    rng = np.random.default_rng(0)
    for kind, scenes in pools().items():
        chosen = [scenes[i] for i in rng.integers(0, len(scenes), args.pictures)]
        wrong = wrong_pictures(engine, chosen, args.steps)
        right = args.pictures - len(wrong)
        print(f"{kind}: {right} of {args.pictures} right")  # noqa: T201
        for scene, shown in wrong[:5]:
            print(f"  {scene.prompt}: {shown.prompt if shown else 'not readable'}")  # noqa: T201


if __name__ == "__main__":
    main()
