"""Moving the KV blocks of 8,192 tokens of a Llama-3.1-8B: 1.07 GB, 512 scattered blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from baton.engine.kernels.cuda import blocks
from baton.engine.kernels.cuda.payload import PayloadLayout

from .lines import Line
from .races import (
    Bars,
    Peers,
    as_torch,
    copy_bandwidth,
    entered,
    has_torch,
    of_torch,
    own,
    race,
    verdict,
)
from .stage import Stage


def moving(stage: Stage) -> Iterator[Line]:
    """Gather, scatter, re-slice, copy and sum; conversions."""
    ceiling = copy_bandwidth(stage)
    yield Line("copy bandwidth", f"{ceiling / 1e12:.2f} TB/s", figures={"bytes_per_s": ceiling})
    layers, count, heads = stage.size(32, 2), stage.size(512, 4), stage.size(8, 2)
    pool = stage.random_bf16((layers, 2 * count, 2, heads, 16, 128))
    target = stage.random_bf16((layers, 2 * count, 2, heads, 16, 128))
    order = np.random.default_rng(6).permutation(2 * count)
    bench = _Bench(stage, pool, target, order[:count], ceiling)
    yield bench.move("gather", PayloadLayout(layers, count, heads, 16, 128))
    yield bench.move("scatter", PayloadLayout(layers, count, heads, 16, 128), back=True)
    half = PayloadLayout(layers, count, heads // 2, 16, 128)
    yield bench.move("gather, half the heads", half, head_start=heads // 2)
    yield bench.move("scatter, half the heads", half, back=True, head_start=heads // 2)
    wide = PayloadLayout(layers, count // 2, heads, 32, 128)
    yield bench.move("gather, blocks of 32", wide)
    yield bench.move("scatter, blocks of 32", wide, back=True)
    for name in ("fp16", "fp8_head", "fp8_token", "int8_head", "int8_token"):
        layout = PayloadLayout(layers, count, heads, 16, 128, name)
        yield bench.move(f"gather as {name}", layout)
        yield bench.move(f"scatter from {name}", layout, back=True)
    yield bench.pools()
    yield bench.sum()


class _Bench:
    """A pool, the blocks of a request in it, and where they go."""

    def __init__(self, stage: Stage, pool: Any, target: Any, ids: Any, ceiling: float) -> None:
        self.stage, self.pool, self.target, self.ceiling = stage, pool, target, ceiling
        self.host_ids = ids
        self.ids = blocks.upload_ids(stage.device, ids)
        self.digest = stage.device.zeros((1,), np.uint64)
        self.space = stage.device.zeros((blocks.WORKSPACE_WORDS,), np.uint64)
        self.payload: Any = None

    def move(
        self, what: str, layout: PayloadLayout, *, back: bool = False, head_start: int = 0
    ) -> Line:
        """A gather, or its inverse, which scatters the payload of the gather before."""
        stage, rest = self.stage, (self.digest, self.space)
        if self.payload is None or self.payload.shape != (layout.nbytes,):
            self.payload = stage.device.zeros((layout.nbytes,), np.uint8)
        payload = self.payload
        if back:
            work = lambda: blocks.scatter_blocks(  # noqa: E731
                stage.device, payload, layout, self.ids, self.pool, *rest, head_start=head_start
            )
        else:
            work = lambda: blocks.gather_blocks(  # noqa: E731
                stage.device, self.pool, self.ids, layout, payload, *rest, head_start=head_start
            )
        elements = layout.element_bytes // layout.how.dtype.itemsize
        floor = (2 * elements + layout.nbytes) / self.ceiling
        whole = layout.encoding == "bf16" and layout.heads == self.pool.shape[3]
        bars = Bars(floor, 0.85 if layout.how.largest else 0.9, ahead=whole)
        peers = self._peers(back) if whole and layout.block_size == 16 else {}
        runners, refused = entered(peers)
        return verdict(what, race(stage, [own(stage, [work], 4), *runners]), bars, refused)

    def _peers(self, back: bool) -> Peers:
        if not has_torch():
            return {}

        def indexed() -> Any:
            import torch

            pool = as_torch(self.pool)
            ids = torch.tensor(self.host_ids, device=pool.device)
            some = torch.index_select(pool, 1, ids)
            if back:
                work = lambda: pool.index_copy_(1, ids, some)  # noqa: E731
            else:
                work = lambda: torch.index_select(pool, 1, ids, out=some)  # noqa: E731
            return of_torch(self.stage, "torch index", [work])

        return {"torch index": indexed}

    def pools(self) -> Line:
        """From pool to pool, as a decode worker reads a prefill worker's."""
        stage, layers = self.stage, self.pool.shape[0]
        work = lambda: blocks.copy_blocks(  # noqa: E731
            stage.device, self.pool, self.ids, self.target, self.ids, self.digest, self.space,
            layer_count=layers,
        )  # fmt: skip
        floor = 2 * self._nbytes() / self.ceiling
        return verdict("pool to pool", race(stage, [own(stage, [work], 4)]), Bars(floor, 0.9))

    def sum(self) -> Line:
        """The digest alone, which reads and writes nothing."""
        stage, layers = self.stage, self.pool.shape[0]
        work = lambda: blocks.sum_blocks(  # noqa: E731
            stage.device, self.pool, self.ids, self.digest, self.space, layer_count=layers
        )
        floor = self._nbytes() / self.ceiling
        return verdict("digest of the blocks", race(stage, [own(stage, [work], 4)]), Bars(floor))

    def _nbytes(self) -> int:
        return int(self.pool.nbytes) * self.ids.count // int(self.pool.shape[1])
