"""Find the text that is most similar to a question, with an embedding model.

The first argument is the model: a folder, or org/name on the hub, such as
sentence-transformers/all-MiniLM-L6-v2.
"""

import sys

import numpy as np

from baton import LLM

texts = ["the cat sat on the mat", "stocks fell on Monday", "a dog slept on the sofa"]
question = "where did the cat sit?"

with LLM(sys.argv[1], kv_memory="8MiB") as llm:
    vectors = llm.embed([question, *texts])

vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
scores = vectors[1:] @ vectors[0]
for score, text in sorted(zip(scores, texts, strict=True), reverse=True):
    print(f"{score:.3f} {text}")
