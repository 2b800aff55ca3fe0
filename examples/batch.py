"""Answer a list of prompts on a cluster that this script starts and ends.

The first argument is the model: a folder, or org/name on the hub. Without it: the demo model.
"""

import sys

from baton import LLM, SamplingParams

prompts = ["Once upon a time", "The fox", "A machine that"]
params = SamplingParams(temperature=0.8, max_new_tokens=16, seed=7)

with LLM(*sys.argv[1:2], decode=1, kv_memory="32MiB") as llm:
    results = llm.generate(prompts, params, n=2)

for result in results:
    print(f"{result.prompt!r} ({result.usage.total_tokens} tokens)")
    for answer in result.outputs:
        print(f"  {answer.index} {answer.finish_reason:6} {answer.text!r}")
