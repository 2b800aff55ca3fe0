"""Moving the KV blocks of 8,192 tokens of a Llama-3.1-8B: 1.07 GB, 512 scattered blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from baton.engine.kernels.cuda import blocks

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
    """Gather, scatter, copy and sum."""
    ceiling = copy_bandwidth(stage)
    yield Line("copy bandwidth", f"{ceiling / 1e12:.2f} TB/s", figures={"bytes_per_s": ceiling})
    layers, count, heads = stage.size(32, 2), stage.size(512, 4), stage.size(8, 2)
    pool = stage.random_bf16((layers, 2 * count, 2, heads, 16, 128))
    target = stage.random_bf16((layers, 2 * count, 2, heads, 16, 128))
    order = np.random.default_rng(6).permutation(2 * count)
    bench = _Bench(stage, pool, target, order[:count], ceiling)
    yield bench.move("gather")
    yield bench.move("scatter", back=True)
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
        self.layers = blocks.Layers(0, pool.shape[0])
        self.nbytes = blocks.payload_bytes(pool, pool.shape[0], len(ids))
        self.payload = stage.device.zeros((self.nbytes,), np.uint8)

    def move(self, what: str, *, back: bool = False) -> Line:
        """A gather, or its inverse, which scatters the payload of the gather before."""
        stage, rest = self.stage, (self.digest, self.space)
        if back:
            work = lambda: blocks.scatter_blocks(  # noqa: E731
                stage.device, self.payload, self.layers, self.ids, self.pool, *rest
            )
        else:
            work = lambda: blocks.gather_blocks(  # noqa: E731
                stage.device, self.pool, self.ids, self.layers, self.payload, *rest
            )
        bars = Bars(2 * self.nbytes / self.ceiling, 0.9, ahead=True)
        runners, refused = entered(self._peers(back))
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
        stage = self.stage
        work = lambda: blocks.copy_blocks(  # noqa: E731
            stage.device, self.pool, self.ids, self.target, self.ids, self.layers, self.digest,
            self.space,
        )  # fmt: skip
        floor = 2 * self.nbytes / self.ceiling
        return verdict("pool to pool", race(stage, [own(stage, [work], 4)]), Bars(floor, 0.9))

    def sum(self) -> Line:
        """The digest alone, which reads and writes nothing."""
        stage = self.stage
        work = lambda: blocks.sum_blocks(  # noqa: E731
            stage.device, self.pool, self.ids, self.layers, self.digest, self.space
        )
        floor = self.nbytes / self.ceiling
        return verdict("digest of the blocks", race(stage, [own(stage, [work], 4)]), Bars(floor))
