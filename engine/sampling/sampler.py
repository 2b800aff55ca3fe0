"""Samples a token from a row of logits; docs/sampling.md defines the method.

The result is a pure function of the row and the :class:`SampleSpec`. This module is the
fast form of :func:`.reference.sample_reference` and agrees with it bit by bit. It never
sorts token ids: equal weights can change places without changing a sum. So sorted
values give the cut, and ids decide only between values equal to the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.errors import InternalError
from baton.proto.prompt_log_probs import Records, record_type
from baton.proto.sampling import SamplingParams

from ..scheduling.plan import Bools, SampleSpec
from .philox import uniform

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

_BLOCK = 128
_PIECE = 64


def _load_compiled() -> Callable[[F32, float, float, float], int] | None:
    try:
        from ..kernels import _cpu
    except ImportError:
        return None
    return partial(_cpu.draw, _cpu.instruction_sets()[0][0])


_compiled = _load_compiled()


def sample(logits: F32, spec: SampleSpec) -> tuple[int, TokenLogProbs | None]:
    """Sample a token from ``logits[vocab]`` (left unchanged), with log-probs if requested.

    Raises :class:`InternalError` if the history does not fit the vocabulary, or if bans,
    processors and a grammar leave no token. Errors of a mask propagate.
    """
    token = _draw(_adjusted(logits, spec), spec)
    return token, log_probs(logits, token, spec.logprobs) if spec.logprobs else None


def is_greedy(params: SamplingParams) -> bool:
    """True if the most likely token is taken without a random draw."""
    return params.top_k == 1 or np.float32(params.temperature) == 0


def log_probs(logits: F32, token: int, top: int) -> TokenLogProbs:
    """Return the log-softmax of the raw logits for ``token`` and for the ``top`` tokens."""
    highest = float(logits.max())
    log_total = float(np.log(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)))
    ids = _largest(logits, min(top, len(logits)))
    ranked = ids[np.argsort(-logits[ids], kind="stable")]
    best = {int(i): float(logits[i]) - highest - log_total for i in ranked}
    return TokenLogProbs.of(float(logits[token]) - highest - log_total, best)


def prompt_log_probs(logits: F32, targets: npt.NDArray[np.int32], top: int) -> Records:
    """Return the records of known next tokens: ``logits[k, vocab]``, ``targets[k]``.

    The numbers are those of :func:`log_probs`, rounded to float32. Raises InternalError for
    non-finite logits.
    """
    if not np.isfinite(logits.sum(axis=1)).all():
        raise InternalError("the model produced non-finite logits")
    found = np.zeros(len(targets), record_type(top))
    for row, token, record in zip(logits, targets.tolist(), found, strict=True):
        entry = log_probs(row, token, top)
        likely = entry.top
        record["logprob"] = entry.logprob
        record["rank"] = 1 + np.count_nonzero(row > row[token])
        record["ids"][: len(likely)] = list(likely)
        record["logprobs"][: len(likely)] = list(likely.values())
    return found


def _adjusted(logits: F32, spec: SampleSpec) -> F32:
    """Return the logits after biases, penalties, processors, bans and mask.

    Returns the input if none of them apply.
    """
    params, mask = spec.params, spec.mask
    changes = params.needs_penalties or params.logits_processors or params.logit_bias
    if not (changes or spec.banned or mask is not None):
        return logits
    adjusted = logits.copy()
    if params.logit_bias:
        _add_biases(adjusted, params.logit_bias)
    if params.needs_penalties:
        _penalize(adjusted, spec)
    for processor in params.logits_processors or ():
        processor(adjusted)
    if mask is not None:
        adjusted[~_left(mask.allowed(), spec.banned)] = -np.inf
    elif spec.banned:
        adjusted[np.asarray(spec.banned)] = -np.inf
    return adjusted


def _left(allowed: Bools, banned: tuple[int, ...]) -> Bools:
    """Combine a grammar and bans. If the grammar allows only banned tokens, bans are lifted."""
    if not banned:
        return allowed
    left = allowed.copy()
    left[np.asarray(banned)] = False
    return left if left.any() else allowed


def _add_biases(logits: F32, biases: Mapping[int, float]) -> None:
    """Add the biases in place."""
    ids = np.fromiter(biases, np.int64, len(biases))
    if ids.min() < 0 or ids.max() >= len(logits):
        raise InternalError("logit_bias has ids outside the vocabulary")
    logits[ids] += np.fromiter(biases.values(), np.float32, len(biases))


def _penalize(logits: F32, spec: SampleSpec) -> None:
    """Apply repetition, frequency and presence penalties in place."""
    params, history = spec.params, spec.history
    if history.size and (history.min() < 0 or history.max() >= len(logits)):
        raise InternalError("the history holds ids outside the vocabulary")
    if params.repetition_penalty != 1.0:
        seen, penalty = logits[history], np.float32(params.repetition_penalty)
        logits[history] = np.where(seen > 0, seen / penalty, seen * penalty)
    generated = history[spec.prompt_length :]
    if generated.size and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(generated, return_counts=True)
        logits[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        logits[ids] -= np.float32(params.presence_penalty)


def _draw(logits: F32, spec: SampleSpec) -> int:
    """Choose the most likely token, or filter and draw once."""
    params = spec.params
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise InternalError("no token is left to draw, or a logit is not a number")
    if is_greedy(params):
        return best
    with np.errstate(over="ignore"):  # an overflow gives -inf, weight 0: the correct limit
        scaled = (logits - logits[best]) / np.float32(params.temperature)
    ids: Ids | None = None
    if 0 < params.top_k < len(scaled):
        ids = _largest(scaled, params.top_k)
        scaled = scaled[ids]
    weights, share = np.exp(scaled), uniform(params.seed, spec.position)
    index = compiled_draw(weights, params.top_p, params.min_p, share)
    if index is None:
        index = _choose(weights, params, share)
    return index if ids is None else int(ids[index])


def _choose(weights: F32, params: SamplingParams, share: float) -> int:
    """Return the index drawn after top-p and min-p."""
    keep = _filtered(weights, params)
    if keep is None:
        return _invert(weights, share)
    return int(keep[_invert(weights[keep], share)])


def compiled_draw(weights: F32, top_p: float, min_p: float, uniform: float) -> int | None:
    """Return the index drawn from ``weights[n]`` (>= 0, contiguous) after top-p and min-p.

    The index equals that of the NumPy form. Returns None if rounding could decide a filter, or
    without compiled kernels.
    """
    if _compiled is None:
        return None
    index = _compiled(weights, top_p, min_p, uniform)
    return index if index >= 0 else None


def _filtered(weights: F32, params: SamplingParams) -> Ids | None:
    """Return the ascending indices that top-p and min-p keep; None for all."""
    keep = _nucleus(weights, params.top_p) if params.top_p < 1 else None
    if params.min_p > 0:
        likely = weights >= np.float32(params.min_p)
        keep = np.flatnonzero(likely) if keep is None else keep[likely[keep]]
    return keep


def _largest(values: F32, count: int) -> Ids:
    """Return the ascending indices of the ``count`` largest values; ties prefer low indices."""
    at = len(values) - count
    return _above(values, np.partition(values, at)[at], count) if count else np.empty(0, np.intp)


def _above(values: F32, cut: np.float32, count: int) -> Ids:
    """Return the indices above ``cut``, filled up to ``count`` with the lowest equal ones."""
    ids = np.flatnonzero(values >= cut)
    surplus = len(ids) - count
    if surplus <= 0:
        return ids
    ties = np.flatnonzero(values[ids] == cut)
    return np.delete(ids, ties[len(ties) - surplus :])


def _nucleus(weights: F32, top_p: float) -> Ids:
    """Return the indices of the fewest largest weights whose sum reaches ``top_p`` of all."""
    total = _Sums(weights).total
    target = top_p * total
    # All weights below this bound together weigh less than half of 1 - top_p: none is needed.
    bound = np.float32(0.5 * (1 - top_p) * total / len(weights))
    possible = weights >= bound
    few = 2 * np.count_nonzero(possible) < len(weights)
    ranked = np.sort(weights[np.flatnonzero(possible)] if few else weights)[::-1]
    sums = _Sums(ranked)
    if few and sums.total < target:  # top_p is within rounding of 1
        ranked = np.sort(weights)[::-1]
        sums = _Sums(ranked)
    last = sums.find(target, "left")
    return _above(weights, ranked[last], last + 1)


def _invert(weights: F32, draw: float) -> int:
    """Return the first index whose running sum exceeds ``draw`` times the total."""
    sums = _Sums(weights)
    threshold = draw * sums.total
    # Rounding can lift the product to the total; then take the last weight above 0.
    return sums.find(threshold, "right" if threshold < sums.total else "left")


class _Sums:
    """Running sums of float32 weights in float64.

    Order of summation: blocks of 128 entries, each from left to right, then the blocks from
    left to right. The running sum at an entry is the sum of the previous blocks and of the
    entries of its block up to it. Blocks limit rounding, time and the depth of a parallel version.
    """

    def __init__(self, weights: F32) -> None:
        self._count = len(weights)
        blocks = -(-len(weights) // _BLOCK)
        self._blocks = np.zeros((blocks, _BLOCK), np.float32)
        self._blocks.reshape(-1)[: len(weights)] = weights
        # In pieces: allocating memory for all blocks at once costs more than the sums.
        pieces = range(0, blocks, _PIECE)
        inside = [_sum_blocks(self._blocks[at : at + _PIECE]) for at in pieces]
        self._ends = np.cumsum(np.concatenate(inside))
        self.total = float(self._ends[-1])

    def find(self, threshold: float, side: Literal["left", "right"]) -> int:
        """Return the first index whose sum reaches ("left") or exceeds ("right") ``threshold``.

        Returns the last index if no sum does.
        """
        block = int(np.searchsorted(self._ends, threshold, side))
        if block == len(self._ends):
            return self._count - 1
        before = self._ends[block - 1] if block else 0.0
        running = before + np.cumsum(self._blocks[block], dtype=np.float64)
        index = block * _BLOCK + int(np.searchsorted(running, threshold, side))
        return min(index, self._count - 1)


def _sum_blocks(blocks: F32) -> npt.NDArray[np.float64]:
    """Return the sum of each row of ``blocks[n, 128]``, from left to right."""
    if len(blocks) == 1:  # NumPy would fold the axes and sum in another order
        return np.cumsum(blocks[0], dtype=np.float64)[-1:]
    columns = blocks.T.astype(np.float64, order="C")
    return np.asarray(np.add.reduce(columns, axis=0))
