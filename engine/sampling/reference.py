"""The sampling method written for reading, step by step as in docs/sampling.md.

Not used for serving; tests compare :mod:`.sampler` with these results, token by token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..scheduling.plan import SampleSpec
from .philox import uniform

F32 = npt.NDArray[np.float32]
Weigh = Callable[[F32, np.float32], tuple[F32, F32]]


def platform_weights(below: F32, temperature: np.float32) -> tuple[F32, F32]:
    """Return scores and weights of logits minus their maximum, with the platform's exp()."""
    with np.errstate(over="ignore"):
        scores = below / temperature
    return scores, np.exp(scores)


def sample_reference(logits: F32, spec: SampleSpec, weigh: Weigh = platform_weights) -> int:
    """Sample a token from ``logits[vocab]``."""
    params = spec.params
    logits = logits.astype(np.float32)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    _penalties(logits, spec)
    for processor in params.logits_processors or ():
        processor(logits)
    banned = set(spec.banned)
    if spec.mask is not None:
        allowed = {token for token, yes in enumerate(spec.mask.allowed()) if yes}
        if allowed <= banned:  # the grammar allows nothing but the end
            banned = set()
        banned |= set(range(len(logits))) - allowed
    for token in banned:
        logits[token] = -np.inf
    best = int(np.argmax(logits))
    if params.top_k == 1 or np.float32(params.temperature) == 0:
        return best

    scaled, all_weights = weigh(logits - logits[best], np.float32(params.temperature))
    survivors = list(range(len(logits)))
    if params.top_k > 0:
        survivors = sorted(survivors, key=lambda i: (-scaled[i], i))[: params.top_k]
    weights = {i: all_weights[i] for i in sorted(survivors)}

    if params.top_p < 1:
        target = params.top_p * running_sums(list(weights.values()))[-1]
        ranked = sorted(weights, key=lambda i: (-weights[i], i))
        sums = running_sums([weights[i] for i in ranked])
        enough = [n for n, reached in enumerate(sums) if reached >= target]
        kept = ranked[: enough[0] + 1] if enough else ranked
        weights = {i: weights[i] for i in sorted(kept)}
    if params.min_p > 0:
        weights = {i: w for i, w in weights.items() if w >= np.float32(params.min_p)}

    sums = running_sums(list(weights.values()))
    threshold = uniform(params.seed, spec.position) * sums[-1]
    for token, reached in zip(weights, sums, strict=True):
        if reached > threshold:
            return token
    return max(i for i, w in weights.items() if w > 0)


def running_sums(weights: list[np.float32]) -> list[float]:
    """Return running sums in float64: inside blocks of 128 entries, plus the previous blocks."""
    sums, before = [], 0.0
    for start in range(0, len(weights), 128):
        inside = 0.0
        for weight in weights[start : start + 128]:
            inside += float(weight)
            sums.append(before + inside)
        before += inside
    return sums


def _penalties(logits: F32, spec: SampleSpec) -> None:
    params = spec.params
    history = [int(t) for t in spec.history]
    generated = history[spec.prompt_length :]
    repetition = np.float32(params.repetition_penalty)
    for token in set(history):
        value = logits[token]
        logits[token] = value / repetition if value > 0 else value * repetition
    for token in set(generated):
        count = np.float32(generated.count(token))
        logits[token] -= np.float32(params.frequency_penalty) * count
        logits[token] -= np.float32(params.presence_penalty)
