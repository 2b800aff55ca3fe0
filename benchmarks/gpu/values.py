"""Values of attention over long sequences: 16k tokens in decode, a prompt of 8k in prefill.

Compared with a float64 definition in NumPy, in sampled rows, and with torch in all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.kernels.cuda.attention import HEAD_DIMS
from baton.engine.kernels.cuda.attention_plan import ALL_POSITIONS
from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.reference import from_bf16

from .lines import Line, checked, skipped
from .races import has_torch
from .stage import Stage

F64 = npt.NDArray[np.float64]
BAR = 5e-3
"""Largest relative error of a row. bf16 weights and results give 1.7e-3; a lost tile of 16 among
16k keys gives 3e-2."""
BLOCK, KV_HEADS, GROUP = 16, 2, 4
_ROWS = 48
"""Rows that NumPy computes, besides the first and last ones."""


@dataclass(frozen=True)
class _Case:
    """Sequences ``(first position, rows)`` in a shuffled pool, and the attention of their rows."""

    what: str
    dim: int
    spans: tuple[tuple[int, int], ...]
    window: int = 0

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """Of each row, in its sequence."""
        return np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in self.spans])

    @property
    def offsets(self) -> npt.NDArray[np.int32]:
        """First row of each sequence, and the number of rows."""
        return np.cumsum([0, *(n for _, n in self.spans)]).astype(np.int32)


def values(stage: Stage) -> Iterator[Line]:
    """Both head sizes; rows near the ends of tiles, splits and blocks are among those compared."""
    long, prompt = stage.size(16384, 700), stage.size(8192, 150)
    for dim in HEAD_DIMS:
        lengths = (long, long // 2 + 1, stage.size(4096, 64), stage.size(1000, 33), 1)
        yield from _compared(stage, _Case("decode", dim, tuple((n - 1, 1) for n in lengths)))
        spans = ((0, prompt), (long - prompt, stage.size(257, 40)))
        yield from _compared(stage, _Case("prefill", dim, spans))
        window = stage.size(4096, 50)
        yield from _compared(stage, _Case(f"prefill, window {window}", dim, spans[1:], window))


def _compared(stage: Stage, case: _Case) -> Iterator[Line]:
    what = f"{case.what} up to {int(case.positions.max()) + 1} tokens, head size {case.dim}"
    q, pool, tables = _inputs(stage, case)
    out = stage.device.download(_attention(stage, case, q, pool, tables))
    found = from_bf16(out).astype(np.float64)
    worst = float("inf")
    if np.isfinite(found).all():
        rows = _sampled(case)
        expected = _expected(stage, case, rows, q, pool, tables)
        worst = _worst(case, rows, found[rows], expected)
    bar = f"{BAR:.0e}"
    yield checked(f"{what}, NumPy in float64", worst <= BAR, f"{worst:.1e}", bar, worst=worst)
    if not has_torch():
        yield skipped(f"{what}, torch", "torch is not installed")
        return
    rows = np.arange(len(found))
    worst = _worst(case, rows, found, _by_torch(stage, case, q, pool, tables))
    yield checked(f"{what}, torch in float32", worst <= BAR, f"{worst:.1e}", bar, worst=worst)


def _worst(case: _Case, rows: npt.NDArray[np.intp], found: F64, expected: F64) -> float:
    """Largest relative error of a row and head.

    Values of a few keys may cancel out; then the error is that of a mean of as many normal values.
    """
    keys = np.minimum(case.positions[rows] + 1, case.window or ALL_POSITIONS)
    usual = np.sqrt(case.dim / keys)[:, None]
    size = np.maximum(np.linalg.norm(expected, axis=-1), usual)
    error = np.linalg.norm(found - expected, axis=-1) / size
    return float(error.max()) if np.isfinite(error).all() else float("inf")


def _inputs(stage: Stage, case: _Case) -> tuple[Any, Any, npt.NDArray[np.int32]]:
    ends = [position + rows for position, rows in case.spans]
    width, heads = -(-max(ends) // BLOCK), KV_HEADS * GROUP
    q = stage.random_bf16((len(case.positions), heads, case.dim), seed=21)
    pool = stage.random_bf16((len(ends) * width, 2, KV_HEADS, BLOCK, case.dim), seed=22)
    order = np.random.default_rng(23).permutation(len(ends) * width)
    return q, pool, order.astype(np.int32).reshape(len(ends), width)


def _attention(stage: Stage, case: _Case, q: Any, pool: Any, tables: Any) -> Any:
    device, backend = stage.device, CudaBackend(stage.device)
    plan = backend.plan_attention(case.offsets, case.positions)
    table, rows, at = (device.upload(a) for a in (tables, case.offsets, case.positions))
    out = device.empty(q.shape, np.uint16)
    backend.attention(q, pool, table, rows, at, case.dim**-0.5, case.window, out, plan)
    return out


def _sampled(case: _Case) -> npt.NDArray[np.intp]:
    count = len(case.positions)
    some = np.random.default_rng(24).integers(0, count, _ROWS)
    edges = [at for edge in (0, 32, 64, 256, 1024, 4096, count) for at in (edge - 1, edge)]
    return np.unique([at for at in (*some, *edges) if 0 <= at < count])


def _keys_and_values(stage: Stage, pool: Any, table: npt.NDArray[np.int32]) -> F64:
    """Keys and values of a sequence ``[2, Hk, T, D]``."""
    blocks = from_bf16(stage.device.download(pool)[table]).astype(np.float64)
    dim = blocks.shape[-1]
    return blocks.transpose(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, dim)


def _expected(
    stage: Stage, case: _Case, rows: npt.NDArray[np.intp], q: Any, pool: Any, tables: Any
) -> F64:
    """Softmax attention of some rows in float64, without any rounding."""
    queries = from_bf16(stage.device.download(q)).astype(np.float64)
    sequence = np.searchsorted(case.offsets, rows, side="right") - 1
    out = np.empty((len(rows), *queries.shape[1:]))
    for s in np.unique(sequence):
        both = _keys_and_values(stage, pool, tables[s])
        for at in np.flatnonzero(sequence == s):
            end = int(case.positions[rows[at]]) + 1
            begin = max(0, end - case.window) if case.window else 0
            keys, seen = both[:, :, begin:end]
            row = queries[rows[at]].reshape(KV_HEADS, GROUP, case.dim)
            scores = row @ keys.transpose(0, 2, 1) * case.dim**-0.5
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            mean = weights @ seen / weights.sum(axis=2, keepdims=True)
            out[at] = mean.reshape(-1, case.dim)
    return out


def _by_torch(stage: Stage, case: _Case, q: Any, pool: Any, tables: Any) -> F64:
    """SDPA in float32 of all rows, a KV head at a time."""
    import torch

    where = "cpu" if stage.cupy is None or stage.tiny else "cuda"
    queries = from_bf16(stage.device.download(q))
    out = np.empty(queries.shape)
    for s, (first, count) in enumerate(case.spans):
        rows = slice(int(case.offsets[s]), int(case.offsets[s + 1]))
        end = first + count
        both = torch.tensor(_keys_and_values(stage, pool, tables[s])[:, :, :end], device=where)
        both = both.to(torch.float32)
        at = torch.arange(first, end, device=where)[:, None]
        keys_at = torch.arange(end, device=where)[None]
        seen = (keys_at <= at) & (keys_at > at - (case.window or end + 1))
        for head in range(KV_HEADS):
            own = slice(head * GROUP, (head + 1) * GROUP)
            mine = torch.tensor(queries[rows, own], dtype=torch.float32, device=where)
            keys, values_ = (x[head].expand(GROUP, -1, -1) for x in both)
            found = torch.nn.functional.scaled_dot_product_attention(
                mine.transpose(0, 1), keys, values_, attn_mask=seen, scale=case.dim**-0.5
            )
            out[rows, own] = found.transpose(0, 1).cpu().numpy()
    return out
