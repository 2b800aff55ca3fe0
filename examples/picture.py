"""Draw two pictures of one prompt, the second with a negative prompt.

The first argument is the folder of a Flux model in the layout of diffusers.
"""

import sys

from baton import LLM


def show(done, total):
    print(f"step {done} of {total}", file=sys.stderr)


with LLM(sys.argv[1]) as llm:
    settings = {"width": 256, "height": 256, "steps": 4, "seed": 7}
    first = llm.image("a red house by the sea", **settings, on_progress=show)
    second = llm.image("a red house by the sea", **settings, negative_prompt="clouds")

first.save("house.png")
second.save("without-clouds.png")
changed = (first.pixels() != second.pixels()).any(axis=2).mean()
print(f"{first.width} x {first.height}, seed {first.seed}: {changed:.0%} of the pixels differ")
