"""What transformers computes for the committed checkpoints, as cases a cluster must meet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
MODELS = ("llama", "llama_plain", "mistral", "qwen2", "qwen3", "gemma3", "phi3")
PROMPTS = 8
NEAR_TIE = 1e-4
"""Margin of two logits up to which their order is rounding; reference logits agree to 1e-4."""


@dataclass(frozen=True)
class Case:
    """A prompt, its greedy continuation and the gap of the two best logits at each step."""

    prompt: list[int]
    greedy: list[int]
    margins: list[float]

    def extended(self, count: int) -> Case:
        """The prompt with ``count`` tokens of its continuation: shares all of its prefix."""
        prompt = self.prompt + self.greedy[:count]
        return Case(prompt, self.greedy[count:], self.margins[count:])

    def differs_at(self, tokens: list[int]) -> int | None:
        """Index of the first token that is not the reference's."""
        assert len(tokens) == len(self.greedy), "another number of tokens"
        pairs = enumerate(zip(tokens, self.greedy, strict=True))
        return next((i for i, (got, wanted) in pairs if got != wanted), None)

    def near_tie(self, tokens: list[int]) -> bool:
        """False for equal tokens, True when they part at a near-tie; fails for any other."""
        at = self.differs_at(tokens)
        if at is None:
            return False
        assert self.margins[at] <= NEAR_TIE, (
            f"prompt of {len(self.prompt)}: token {at} is {tokens[at]}, not {self.greedy[at]}, "
            f"at a margin of {self.margins[at]:.2g}"
        )
        return True


def cases_of(model: str) -> list[Case]:
    """The committed prompts of 1 to 1500 tokens with 64 tokens each."""
    with np.load(DATA / model / "reference.npz") as data:
        return [
            Case(
                data[f"prompt_{i}"].tolist(),
                data[f"greedy_{i}"].tolist(),
                data[f"margins_{i}"].tolist(),
            )
            for i in range(PROMPTS)
        ]


def last_logprobs(model: str) -> list[np.ndarray]:
    """Log-softmax ``[vocab]`` after each committed prompt, from the reference's logits."""
    with np.load(DATA / model / "reference.npz") as data:
        rows = [data[f"logits_{i}"][-1].astype(np.float64) for i in range(PROMPTS)]
    return [row - row.max() - np.log(np.exp(row - row.max()).sum()) for row in rows]
