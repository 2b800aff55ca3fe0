"""Launchers of ``sample.cu``: a token per row of logits, as :mod:`baton.engine.sampling.sampler`.

The sampling parameters of a row are in device memory (:func:`fill_row`), so every replay of a
captured step can use new parameters, masks and histories. A row's result depends only on the
row: not on its place, the other rows or the number of thread blocks. The kernel has its own
exponential. So a token can differ from the CPU's if the drawn share, or a filter's
limit, is within about 1e-6 of a boundary between tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.limits import MAX_LOG_PROBABILITIES as MAX_LOGPROBS

from ...scheduling.plan import Bools, Int32, SampleSpec
from .checks import BF16, check_array
from .device import Device, DeviceArray, Kernel

_SOURCE = "sample.cu"
_THREADS, _PASS_THREADS = 320, 256
_CHUNK, _GROUP, _SUM_BLOCK = 4096, 64, 128
_MAX_BANNED = 8
_WIDE_BYTES, _LEVELS = 25152, 3  # of a row of which a filter keeps many entries: sample_wide.cuh

MAX_VOCAB = 64 * _CHUNK
MAX_TOP_K = 1024

NO_ERROR, NO_TOKEN_LEFT, NOT_FINITE, BAD_ROW = range(4)
"""Result per row: drawn; bans and mask leave no token; NaN or infinity; mask or history missing."""

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("top_k", np.int32),
        ("logprobs", np.int32),
        ("mask", np.int32),
        ("history", np.int32),
        ("banned", np.int32),
        ("ban", np.int32, (_MAX_BANNED,)),
    ]
)
"""Sampling parameters of a row, as the kernels read them: 96 bytes, little endian."""

Rows = npt.NDArray[np.void]
Words = npt.NDArray[np.uint32]


def refusal(vocab: int) -> str:
    """Return why the kernels cannot sample from a vocabulary, or ""."""
    if vocab > MAX_VOCAB:
        return f"the CUDA kernels support vocabularies up to {MAX_VOCAB} tokens, not {vocab}"
    return ""


def fill_row(rows: Rows, at: int, spec: SampleSpec, mask: int = -1, history: int = -1) -> None:
    """Set ``rows[at]`` (of :data:`ROW`) to the parameters of ``spec``.

    ``mask`` and ``history`` are row numbers of the masks and histories on the device, -1 for none.
    A mask must include the bans (:func:`mask_words`). Raises ValueError for unsupported parameters:
    logits processors, biases, more than 8 bans, a ``top_k`` above 1024, more than 20 log-probs.
    """
    params = spec.params
    banned = () if mask >= 0 else spec.banned
    if params.logits_processors:
        raise ValueError("logits processors are code and run on the host")
    if params.logit_bias:
        raise ValueError("the host adds biases to logits")
    if len(banned) > _MAX_BANNED:
        raise ValueError(
            f"{len(banned)} banned ids need a mask; without one, the limit is {_MAX_BANNED}"
        )
    if params.top_k > MAX_TOP_K:
        raise ValueError(f"top_k is {params.top_k}, at most {MAX_TOP_K}")
    if not 0 <= spec.logprobs <= MAX_LOGPROBS:
        raise ValueError(f"{spec.logprobs} log-probs, at most {MAX_LOGPROBS}")
    if params.needs_penalties and history < 0:
        raise ValueError("penalties need a history")
    row = rows[at]
    row["seed"], row["position"], row["top_p"] = params.seed, spec.position, params.top_p
    row["temperature"], row["min_p"] = params.temperature, params.min_p
    row["repetition"] = params.repetition_penalty
    row["frequency"], row["presence"] = params.frequency_penalty, params.presence_penalty
    row["top_k"], row["logprobs"] = max(params.top_k, 0), spec.logprobs
    row["mask"], row["history"] = mask, history if params.needs_penalties else -1
    row["banned"], row["ban"] = len(banned), [*banned, *[-1] * (_MAX_BANNED - len(banned))]


def filtered(rows: Rows, vocab: int) -> bool:
    """True if a row of :data:`ROW` has a filter that may keep thousands of tokens."""
    free = ((rows["top_k"] == 0) | (rows["top_k"] >= vocab)) & (rows["temperature"] != 0)
    return bool((free & ((rows["top_p"] < 1) | (rows["min_p"] > 0))).any())


def mask_words(allowed: Bools, banned: tuple[int, ...] = ()) -> Words:
    """Return a bit per allowed token, 32 per word, the lowest id in the lowest bit.

    If the grammar allows only banned tokens, bans are lifted, because the answer is complete.
    """
    left = allowed.copy()
    left[np.asarray(banned, np.intp)] = False
    return _words(left if left.any() else allowed)


def history_arrays(history: Int32, prompt_length: int, vocab: int) -> tuple[Words, Int32]:
    """Return bits of the tokens that occurred, and ``int32[vocab]`` counts of generated tokens.

    Raises ValueError for an id outside the vocabulary.
    """
    if history.size and (history.min() < 0 or history.max() >= vocab):
        raise ValueError("the history holds ids outside the vocabulary")
    seen = np.zeros(vocab, np.bool_)
    seen[history] = True
    counts = np.bincount(history[prompt_length:], minlength=vocab).astype(np.int32)
    return _words(seen), counts


def _words(bits: Bools) -> Words:
    padded = np.zeros(-(-len(bits) // 32) * 32, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.uint32)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Intermediate results of the passes; one per graph. See :func:`workspace`."""

    vocab: int
    maxima: DeviceArray
    sums: DeviceArray
    wide: DeviceArray


def workspace(device: Device, rows: int, vocab: int) -> Workspace:
    """Allocate the workspace for up to ``rows`` rows. ValueError if the vocabulary is too large."""
    if rows < 1 or not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"{rows} rows of a vocabulary of {vocab}: at least 1, at most {MAX_VOCAB}")
    chunks = _chunks(vocab)
    maxima = device.empty((rows, 2, chunks * (_CHUNK // _GROUP + 1)), np.float32)
    sums = device.empty((rows, chunks * (_CHUNK // _SUM_BLOCK + 1)), np.float64)
    return Workspace(vocab, maxima, sums, device.empty((rows, _WIDE_BYTES), np.uint8))


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Masks and histories that rows refer to, or None.

    ``masks``: uint32 ``[M, ceil(vocab / 32)]`` of :func:`mask_words`. ``seen``: uint32 and
    ``counts``: int32 ``[P, vocab]`` of :func:`history_arrays`.
    """

    masks: DeviceArray | None = None
    seen: DeviceArray | None = None
    counts: DeviceArray | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Log-probabilities of the raw logits, for rows that request them; else NaN, -1 and -inf.

    ``token``: float32 ``[B]``, of the sampled token. ``ids`` int32 and ``values`` float32
    ``[B, 20]``: the most likely tokens, ties by lowest id, padded with -1 and -inf.
    """

    token: DeviceArray
    ids: DeviceArray
    values: DeviceArray


def sample(
    device: Device,
    logits: DeviceArray,
    rows: DeviceArray,
    space: Workspace,
    tokens: DeviceArray,
    errors: DeviceArray,
    restrictions: Restrictions = Restrictions(),
    report: Report | None = None,
    *,
    record: bool = False,
    filters: bool = True,
) -> None:
    """Sample ``tokens[B]`` (int32) from ``logits[B, stride]`` (float32, or bf16 as uint16).

    Only the first ``space.vocab`` logits of a row are used; ``stride`` is a multiple of 4.
    ``rows``: uint8 ``[B, 96]``, the bytes of :data:`ROW`. ``errors[B]`` (int32): :data:`NO_ERROR`
    or the reason why a row has no token; its token is then 0. ``record`` adds the tokens to the
    histories of their rows, for a step queued before the host knows them. ``filters``: rows may
    have a filter of :func:`filtered`; six kernels more, which do nothing if few tokens stay. Wrong
    arguments raise ValueError.
    """
    batch, stride = _check(logits, rows, space, tokens, errors)
    masks, histories = _check_restrictions(restrictions, space.vocab)
    if report is not None:
        check_array("report.token", report.token, np.float32, (batch,))
        check_array("report.ids", report.ids, np.int32, (batch, MAX_LOGPROBS))
        check_array("report.values", report.values, np.float32, (batch, MAX_LOGPROBS))
    if not batch:
        return
    chunks = _chunks(space.vocab)
    common = (
        logits, np.int32(stride), np.int32(space.vocab), rows, restrictions.masks,
        restrictions.seen, restrictions.counts, np.int32(masks), np.int32(histories),
        space.maxima, space.sums, space.wide,
    )  # fmt: skip
    name = "bf16" if logits.dtype == BF16 else "f32"
    for kernel in (f"sample_scan_{name}", f"sample_weigh_{name}"):
        device.launch(Kernel(_SOURCE, kernel), (chunks, batch), (_PASS_THREADS,), common)
    device.launch(
        Kernel(_SOURCE, f"sample_choose_{name}"), (batch,), (_THREADS,),
        (*common, np.int32(chunks), np.int32(record), tokens, errors),
    )  # fmt: skip
    if filters:
        for kernel, more in (
            *((f"sample_bins_{name}", (np.int32(level),)) for level in range(_LEVELS)),
            (f"sample_count_{name}", ()),
            (f"sample_sum_{name}", ()),
        ):
            grid = (chunks, batch)
            device.launch(Kernel(_SOURCE, kernel), grid, (_PASS_THREADS,), (*common, *more))
        device.launch(
            Kernel(_SOURCE, f"sample_draw_{name}"), (batch,), (_PASS_THREADS,),
            (*common, np.int32(chunks), np.int32(record), tokens),
        )  # fmt: skip
    if report is not None:
        device.launch(
            Kernel(_SOURCE, f"sample_report_{name}"), (batch,), (_THREADS,),
            (*common, np.int32(chunks), tokens, errors, report.token, report.ids, report.values),
        )  # fmt: skip


def _chunks(vocab: int) -> int:
    return -(-vocab // _CHUNK)


def _check(
    logits: DeviceArray,
    rows: DeviceArray,
    space: Workspace,
    tokens: DeviceArray,
    errors: DeviceArray,
) -> tuple[int, int]:
    """Return batch and stride. Raises ValueError if the arguments do not fit together."""
    dtype: np.dtype[Any] = BF16 if logits.dtype == BF16 else np.dtype(np.float32)
    check_array("logits", logits, dtype, (None, None))
    batch, stride = logits.shape
    if stride % 4 or stride < space.vocab:
        raise ValueError(
            f"rows of {stride} logits for a vocabulary of {space.vocab}: "
            "a multiple of 4, not less than the vocabulary"
        )
    if batch > min(space.maxima.shape[0], 65535):
        raise ValueError(f"{batch} rows, the workspace is for {space.maxima.shape[0]}")
    check_array("rows", rows, np.uint8, (batch, ROW.itemsize))
    check_array("tokens", tokens, np.int32, (batch,))
    check_array("errors", errors, np.int32, (batch,))
    chunks = _chunks(space.vocab)
    check_array("maxima", space.maxima, np.float32, (None, 2, chunks * (_CHUNK // _GROUP + 1)))
    sums = (space.maxima.shape[0], chunks * (_CHUNK // _SUM_BLOCK + 1))
    check_array("sums", space.sums, np.float64, sums)
    check_array("wide", space.wide, np.uint8, (space.maxima.shape[0], _WIDE_BYTES))
    return batch, stride


def _check_restrictions(given: Restrictions, vocab: int) -> tuple[int, int]:
    """Return the numbers of masks and histories."""
    words, masks, histories = -(-vocab // 32), 0, 0
    if given.masks is not None:
        check_array("masks", given.masks, np.uint32, (None, words))
        masks = given.masks.shape[0]
    if (given.seen is None) != (given.counts is None):
        raise ValueError("a history is two arrays, seen and counts")
    if given.seen is not None and given.counts is not None:
        check_array("seen", given.seen, np.uint32, (None, words))
        histories = given.seen.shape[0]
        check_array("counts", given.counts, np.int32, (histories, vocab))
    return masks, histories
