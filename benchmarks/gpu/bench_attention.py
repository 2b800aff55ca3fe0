"""Attention with the heads of a Llama-3.1-8B: 32 query and 8 KV heads of 128."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from baton.engine.kernels.cuda.backend import CudaBackend
from baton.engine.kernels.cuda.device import Device

from .lines import Line
from .races import (
    Bars,
    Peers,
    Runner,
    as_torch,
    copy_bandwidth,
    entered,
    has_torch,
    matrix_rate,
    of_torch,
    own,
    race,
    verdict,
)
from .stage import Stage

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
SCALE = DIM**-0.5
ENOUGH = 1 << 30
"""Bytes of KV that exceed every cache: smaller batches alternate between several pools."""
LARGE = 256 << 20


def decoding(stage: Stage) -> Iterator[Line]:
    """One query row per sequence, beside the copy bandwidth and peers on the same KV."""
    ceiling = copy_bandwidth(stage)
    cases = ((1, 8192), (32, 4096), (64, 2048), (256, 1024))
    for batch, length in ((2, 40), (1, 24)) if stage.tiny else cases:
        yield DecodeBench(stage, batch, length, ceiling).line()
    for batch, length in ((2, 40),) if stage.tiny else ((1, 8192), (64, 2048)):
        yield Int8DecodeBench(stage, batch, length, ceiling).line()


class DecodeBench:
    """Decode attention of a batch of sequences of equal length, alternating between layers.

    ``row_bytes``: bytes of a token's keys or values of one head.
    """

    row_bytes = 2 * DIM

    def __init__(self, stage: Stage, batch: int, length: int, ceiling: float) -> None:
        self.stage, self.batch, self.length, self.ceiling = stage, batch, length, ceiling
        width = -(-length // BLOCK)
        self.nbytes = 2 * batch * length * KV_HEADS * self.row_bytes
        self.layers = stage.size(max(1, -(-ENOUGH // self.nbytes)), 1)
        self.kv = self._pool((self.layers, batch * width, 2, KV_HEADS))
        self.q = stage.random_bf16((batch, HEADS, DIM))
        self.output: Any = stage.device.empty((batch, HEADS, DIM), np.uint16)
        order = np.random.default_rng(7).permutation(batch * width)
        self.tables = order.astype(np.int32).reshape(batch, width)

    def _pool(self, shape: tuple[int, ...]) -> Any:
        return self.stage.random_bf16((*shape, BLOCK, DIM))

    def line(self) -> Line:
        """Time Baton's kernel, then the peers."""
        share = 0.85 if self.nbytes >= LARGE else 0.7
        bars = Bars(self.nbytes / self.ceiling, share, ahead=True)
        runners, refused = entered(self._peers())
        times = race(self.stage, [self.own(self.stage.device), *runners])
        what = f"decode {self.batch} x {self.length}, {self.nbytes >> 20} MiB of KV"
        return verdict(what, times, bars, refused)

    def own(self, device: Device, name: str = "ours") -> Runner:
        """Return Baton's kernel on a device, the stage's or a tuned form; writes :attr:`output`."""
        backend = CudaBackend(device)
        offsets = np.arange(self.batch + 1, dtype=np.int32)
        positions = np.full(self.batch, self.length - 1, np.int32)
        plan = backend.plan_attention(offsets, positions)
        tables, rows, at = (device.upload(a) for a in (self.tables, offsets, positions))

        def work(layer: int) -> None:
            kv = self.kv[layer]
            backend.attention(self.q, kv, tables, rows, at, SCALE, 0, self.output, plan)

        works = [partial(work, layer) for layer in range(self.layers)]
        stage, rounds = replace(self.stage, device=device), max(1, 8 // self.layers)
        return own(stage, works, rounds, name)

    def _peers(self) -> Peers:
        peers: dict[str, Callable[[], Runner]] = {}
        if has_torch():
            backends = {"SDPA cuDNN": "CUDNN_ATTENTION", "SDPA flash": "FLASH_ATTENTION"}
            peers = {name: partial(self._sdpa, name, how) for name, how in backends.items()}
            peers["flex_attention"] = self._flex
        if importlib.util.find_spec("flashinfer") is not None:
            peers["FlashInfer"] = self._flashinfer
        return peers

    def _contiguous(self) -> list[tuple[Any, Any]]:
        return [contiguous(kv, self.batch, self.length) for kv in self.kv]

    def _sdpa(self, name: str, backend: str) -> Runner:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q = as_torch(self.q)[:, :, None]
        best = getattr(SDPBackend, backend) if self.stage.cupy is not None else SDPBackend.MATH

        def work(k: Any, v: Any) -> None:
            with sdpa_kernel(best):
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, scale=SCALE, enable_gqa=True
                )

        works = [partial(work, k, v) for k, v in self._contiguous()]
        return of_torch(self.stage, name, works, max(1, 8 // self.layers))

    def _flex(self) -> Runner:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q = as_torch(self.q)[:, :, None]
        # Without a mask, torch 2.11 treats KV as one block of 2**30 tokens and divides this number
        # among the splits, so the first split does all work. Full blocks are divided by length.
        # Its table has 3 stages for compute capability 9.0, but a later line sets 1.
        mask = create_block_mask(_everything, None, None, 1, self.length, device=str(q.device))
        options = {"num_stages": 3, "BLOCKS_ARE_CONTIGUOUS": True, "ROWS_GUARANTEED_SAFE": True}
        call: Any = partial(
            torch.compile(flex_attention, dynamic=False),
            block_mask=mask, scale=SCALE, enable_gqa=True, kernel_options=options,
        )  # fmt: skip
        works = [partial(call, q, k, v) for k, v in self._contiguous()]
        return of_torch(self.stage, "flex_attention", works, max(1, 8 // self.layers))

    def _flashinfer(self) -> Runner:
        import flashinfer
        import torch

        space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        wrapper.plan(
            *pages(self.tables, self.length), HEADS, KV_HEADS, DIM, BLOCK,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=SCALE,
        )  # fmt: skip
        q, out = as_torch(self.q), torch.empty_like(as_torch(self.q))
        works = [
            partial(wrapper.run, q, as_torch(self.kv[layer]), out=out)
            for layer in range(self.layers)
        ]
        return of_torch(self.stage, "FlashInfer", works, max(1, 8 // self.layers))


class Int8DecodeBench(DecodeBench):
    """The same sequences in an int8 pool."""

    row_bytes = DIM + 2

    def _pool(self, shape: tuple[int, ...]) -> Any:
        """Return random codes; each magnitude is a bfloat16 number."""
        return self.stage.random_bf16((*shape, BLOCK, self.row_bytes // 2)).view(np.int8)

    def line(self) -> Line:
        """Time the int8 pool and a bfloat16 pool of the same tokens alternately."""
        device, share = self.stage.device, 0.85 if self.nbytes >= LARGE else 0.7
        wide = DecodeBench(self.stage, self.batch, self.length, self.ceiling)
        runners = [self.own(device), wide.own(device, "bfloat16 pool")]
        what = f"decode {self.batch} x {self.length}, {self.nbytes >> 20} MiB of int8 KV"
        return verdict(what, race(self.stage, runners), Bars(self.nbytes / self.ceiling, share))


def prefilling(stage: Stage) -> Iterator[Line]:
    """Causal prompts: one, several, and after a prefix, beside the matrix rate and peers."""
    ceiling = matrix_rate(stage)
    yield Line("matrix rate", f"{ceiling / 1e12:.0f} TFLOP/s", figures={"flops": ceiling})
    tiny = ((1, 24, 0), (1, 16, 0), (2, 16, 0), (1, 16, 24))
    cases = ((1, 8192, 0), (1, 2048, 0), (4, 2048, 0), (1, 2048, 6144))
    for prompts, rows, start in tiny if stage.tiny else cases:
        yield PrefillBench(stage, prompts, rows, start).line(ceiling)


class PrefillBench:
    """Prompts of ``rows`` tokens each, after ``start`` tokens whose KV is in the cache."""

    def __init__(self, stage: Stage, prompts: int, rows: int, start: int) -> None:
        self.stage, self.prompts, self.rows, self.start = stage, prompts, rows, start
        self.length = start + rows
        width = -(-self.length // BLOCK)
        self.kv = stage.random_bf16((prompts * width, 2, KV_HEADS, BLOCK, DIM))
        self.q = stage.random_bf16((prompts * rows, HEADS, DIM))
        order = np.random.default_rng(8).permutation(prompts * width)
        self.tables = order.astype(np.int32).reshape(prompts, width)
        self.output: Any = stage.device.empty(self.q.shape, np.uint16)
        self.flops = 2 * HEADS * DIM * prompts * rows * (2 * start + rows + 1)

    def line(self, ceiling: float) -> Line:
        """Time Baton's kernel, then the peers; ``ceiling``: operations/s of a large product."""
        runners, refused = entered(self._peers())
        times = race(self.stage, [self.own(self.stage.device), *self._variants(), *runners])
        several = f"{self.prompts} x " if self.prompts > 1 else ""
        what = f"prefill of {several}{self.rows}" + (f" behind {self.start}" if self.start else "")
        line = verdict(what, times, Bars(self.flops / ceiling), refused)
        rate = self.flops / times["ours"].median
        return Line(
            line.what, f"{rate / 1e12:.0f} TFLOP/s, {line.result}", line.bar, line.state,
            {**line.figures, "flops": rate},
        )  # fmt: skip

    def _variants(self) -> list[Runner]:
        """Return Baton's kernel with the other way of copying, if the card supports both."""
        device = self.stage.device
        if device.tuning.prefill == "mma":
            return []
        kind: Literal["wgmma", "bulk"] = "bulk" if device.tuning.prefill == "wgmma" else "wgmma"
        other = device.tuned(msgspec.structs.replace(device.tuning, prefill=kind))
        return [replace(self.own(other), name=f"ours by {kind}")]

    def own(self, device: Device) -> Runner:
        """Return Baton's kernel on a device, the stage's or a tuned form; writes :attr:`output`."""
        backend = CudaBackend(device)
        offsets = np.arange(self.prompts + 1, dtype=np.int32) * self.rows
        positions = np.tile(np.arange(self.start, self.length, dtype=np.int32), self.prompts)
        plan = backend.plan_attention(offsets, positions)
        tables, rows, at = (device.upload(a) for a in (self.tables, offsets, positions))
        work = partial(
            backend.attention, self.q, self.kv, tables, rows, at, SCALE, 0, self.output, plan
        )  # fmt: skip
        return own(replace(self.stage, device=device), [work], 2)

    def _peers(self) -> Peers:
        peers: dict[str, Callable[[], Runner]] = {}
        if has_torch():
            # cuDNN's causal mask begins at the upper left, which is wrong after a prefix.
            backends = {} if self.start else {"SDPA cuDNN": "CUDNN_ATTENTION"}
            backends["SDPA flash"] = "FLASH_ATTENTION"
            peers = {name: partial(self._sdpa, name, how) for name, how in backends.items()}
        if importlib.util.find_spec("flashinfer") is not None:
            peers |= {f"FlashInfer {how}": partial(self._flashinfer, how) for how in ("fa3", "fa2")}
        return peers

    def _sdpa(self, name: str, backend: str) -> Runner:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        q = as_torch(self.q).reshape(self.prompts, self.rows, HEADS, DIM).transpose(1, 2)
        k, v = contiguous(self.kv, self.prompts, self.length)
        best = getattr(SDPBackend, backend) if self.stage.cupy is not None else SDPBackend.MATH
        mask = causal_lower_right(self.rows, self.length)

        def call() -> None:
            with sdpa_kernel(best):
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True
                )

        return of_torch(self.stage, name, [call], 2)

    def _flashinfer(self, backend: str) -> Runner:
        import flashinfer
        import torch

        space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND", backend=backend)
        offsets = torch.arange(self.prompts + 1, dtype=torch.int32) * self.rows
        wrapper.plan(
            offsets, *pages(self.tables, self.length), HEADS, KV_HEADS, DIM, BLOCK, causal=True,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=SCALE,
        )  # fmt: skip
        q, kv = as_torch(self.q), as_torch(self.kv)
        work = partial(wrapper.run, q, kv, out=torch.empty_like(q))
        return of_torch(self.stage, f"FlashInfer {backend}", [work], 2)


def contiguous(kv: Any, batch: int, length: int) -> tuple[Any, Any]:
    """Keys and values without pages, ``[B, Hk, T, D]``: an easier problem than paged KV."""
    blocks = as_torch(kv).reshape(batch, -1, 2, KV_HEADS, BLOCK, DIM)
    k, v = blocks.permute(2, 0, 3, 1, 4, 5).reshape(2, batch, KV_HEADS, -1, DIM)
    return k[:, :, :length], v[:, :, :length]


def pages(tables: Any, length: int) -> tuple[Any, Any, Any]:
    """Block tables of sequences of one length for FlashInfer: ends, blocks, rows of the last."""
    import torch

    ends = torch.arange(len(tables) + 1, dtype=torch.int32) * tables.shape[1]
    last = torch.full((len(tables),), (length - 1) % BLOCK + 1, dtype=torch.int32)
    return ends, torch.from_numpy(tables.reshape(-1)), last


def _everything(_batch: Any, _head: Any, _query: Any, key: Any) -> Any:
    return key >= 0
