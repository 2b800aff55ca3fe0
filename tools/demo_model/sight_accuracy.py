"""Count right answers: ``python -m baton.tools.demo_model.sight_accuracy [FOLDER]``.

It asks the demo model that sees about new pictures, with the engine in this process. An answer is
right if all its tokens are.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from baton.client.images import place_images
from baton.deploy.config import demo_vision_model_folder
from baton.engine.llm import LLMEngine
from baton.engine.loading.loader import load_runner
from baton.engine.loading.runner_config import RunnerConfig
from baton.images.processor import ImageProcessor
from baton.proto.contexts.images import ImageMetadata
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.sampling import SamplingParams
from baton.text.tokenizer import Tokenizer

from .sights import TASKS, Sight, sights

SETTINGS = "preprocessor_config.json"
GREEDY = SamplingParams(temperature=0)
NEW_TOKENS = 40


class SeeingModel:
    """The model in ``folder``, loaded in this process."""

    def __init__(self, folder: Path) -> None:
        runner = load_runner(RunnerConfig(model=str(folder), num_blocks=512))
        self.engine = LLMEngine(runner)
        self.tokenizer = Tokenizer.from_folder(folder)
        self._processor = ImageProcessor.from_files({SETTINGS: (folder / SETTINGS).read_bytes()})
        (self._placeholder,) = self.tokenizer.encode("<|image_pad|>").tolist()

    def context(self, sight: Sight, question: str) -> TextAndVisionContext:
        """Return the request with a question about a picture."""
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        tokens = self.tokenizer.encode_chat([{"role": "user", "content": parts}])
        card = self.engine.runner.card
        placed = place_images(tokens, [sight.pixels()], self._processor, self._placeholder, card)
        (image,) = placed.images
        return TextAndVisionContext(
            max_length=len(placed.tokens) + NEW_TOKENS,
            tokens=TokenBuffer(placed.tokens.astype("int64")),
            sampling_params=GREEDY,
            eos_token_ids=set(self.engine.runner.card.eos_token_ids),
            vision_token_ids=[self._placeholder],
            images=[
                ImageMetadata(
                    start_idx=image.start_idx,
                    end_idx=image.end_idx,
                    pixel_values=image.pixel_values,
                )
            ],
            extra_model_args=dict(placed.named),
        )

    def answers(self, asked: Sequence[tuple[Sight, str]]) -> list[str]:
        """Return the greedy answer to each question, without special tokens."""
        contexts = [self.context(*one) for one in asked]
        for context in contexts:
            self.engine.add(context)
        while self.engine.has_work:
            self.engine.step()
        found = [context.tokens.all[context.prompt_length :] for context in contexts]
        return [self.tokenizer.decode(tokens.tolist()) for tokens in found]


def main() -> None:
    """Print the accuracy for each kind of question."""
    parser = argparse.ArgumentParser(description="count right answers about new pictures")
    parser.add_argument("folder", type=Path, nargs="?", default=demo_vision_model_folder())
    parser.add_argument("--pictures", type=int, default=500, help="pictures per kind of question")
    parser.add_argument("--seed", type=int, default=99)
    args = parser.parse_args()
    model = SeeingModel(args.folder)
    for new in (True, False):
        print("held-out combinations" if new else "combinations of the training")  # noqa: T201
        for _, task in TASKS:
            rng = random.Random(args.seed)  # noqa: S311 - a corpus, not a secret
            shown = list(islice(sights(rng, new=new), args.pictures))
            turns = [(sight, *task(rng, sight)) for sight in shown]
            answers = model.answers([(sight, question) for sight, question, _ in turns])
            right = sum(a == t for a, (_, _, t) in zip(answers, turns, strict=True))
            print(f"  {task.__name__:10} {100 * right / len(turns):6.1f} %")  # noqa: T201


if __name__ == "__main__":
    main()
