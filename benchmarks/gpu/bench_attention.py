"""Attention with the heads of a Llama-3.1-8B: 32 query and 8 KV heads of 128."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...engine.kernels.cuda.backend import CudaBackend
from ...engine.kernels.cuda.device import Device
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
"""Bytes of KV that no cache holds: smaller batches take turns with several pools."""
LARGE = 256 << 20


def decoding(stage: Stage) -> Iterator[Line]:
    """One query row per sequence, beside the copy bandwidth and peers on the same KV."""
    ceiling = copy_bandwidth(stage)
    cases = ((1, 8192), (32, 4096), (64, 2048), (256, 1024))
    for batch, length in ((2, 40), (1, 24)) if stage.tiny else cases:
        yield DecodeBench(stage, batch, length, ceiling).line()


class DecodeBench:
    """A batch of sequences of one length; layers that take turns."""

    def __init__(self, stage: Stage, batch: int, length: int, ceiling: float) -> None:
        self.stage, self.batch, self.length, self.ceiling = stage, batch, length, ceiling
        width = -(-length // BLOCK)
        shape = (batch * width, 2, KV_HEADS, BLOCK, DIM)
        self.nbytes = 2 * batch * length * KV_HEADS * DIM * 2
        self.layers = stage.size(max(1, -(-ENOUGH // self.nbytes)), 1)
        self.kv = stage.random_bf16((self.layers, *shape))
        self.q = stage.random_bf16((batch, HEADS, DIM))
        self.output: Any = stage.device.empty((batch, HEADS, DIM), np.uint16)
        order = np.random.default_rng(7).permutation(batch * width)
        self.tables = order.astype(np.int32).reshape(batch, width)

    def line(self) -> Line:
        """Ours, then the peers."""
        share = 0.85 if self.nbytes >= LARGE else 0.7
        bars = Bars(self.nbytes / self.ceiling, share, ahead=True)
        runners, refused = entered(self._peers())
        times = race(self.stage, [self.own(self.stage.device), *runners])
        what = f"decode {self.batch} x {self.length}, {self.nbytes >> 20} MiB of KV"
        return verdict(what, times, bars, refused)

    def own(self, device: Device) -> Runner:
        """Ours on the stage's device or a tuned form of it, into :attr:`output`."""
        backend = CudaBackend(device)
        offsets = np.arange(self.batch + 1, dtype=np.int32)
        positions = np.full(self.batch, self.length - 1, np.int32)
        plan = backend.plan_attention(offsets, positions)
        tables, rows, at = (device.upload(a) for a in (self.tables, offsets, positions))

        def work(layer: int) -> None:
            kv = self.kv[layer]
            backend.attention(self.q, kv, tables, rows, at, SCALE, 0, self.output, plan)

        works = [partial(work, layer) for layer in range(self.layers)]
        return own(replace(self.stage, device=device), works, max(1, 8 // self.layers))

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
        """Keys and values without pages, ``[B, Hk, T, D]``: an easier problem than ours."""
        found = []
        for layer in range(self.layers):
            kv = as_torch(self.kv[layer]).reshape(self.batch, -1, 2, KV_HEADS, BLOCK, DIM)
            kv = kv.permute(2, 0, 3, 1, 4, 5).reshape(2, self.batch, KV_HEADS, -1, DIM)
            found.append((kv[0, :, :, : self.length], kv[1, :, :, : self.length]))
        return found

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
        from torch.nn.attention.flex_attention import flex_attention

        q = as_torch(self.q)[:, :, None]
        call: Any = torch.compile(flex_attention, dynamic=False)
        works = [
            partial(call, q, k, v, scale=SCALE, enable_gqa=True) for k, v in self._contiguous()
        ]
        return of_torch(self.stage, "flex_attention", works, max(1, 8 // self.layers))

    def _flashinfer(self) -> Runner:
        import flashinfer
        import torch

        space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        width = self.tables.shape[1]
        lengths = torch.full((self.batch,), (self.length - 1) % BLOCK + 1, dtype=torch.int32)
        ends = torch.arange(self.batch + 1, dtype=torch.int32) * width
        pages = torch.from_numpy(self.tables.reshape(-1))
        wrapper.plan(
            ends.cuda(), pages.cuda(), lengths.cuda(), HEADS, KV_HEADS, DIM, BLOCK,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=SCALE,
        )  # fmt: skip
        q, out = as_torch(self.q), torch.empty_like(as_torch(self.q))
        works = [
            partial(wrapper.run, q, as_torch(self.kv[layer]), out=out)
            for layer in range(self.layers)
        ]
        return of_torch(self.stage, "FlashInfer", works, max(1, 8 // self.layers))


def prefilling(stage: Stage) -> Iterator[Line]:
    """A causal prompt, beside the matrix rate and SDPA by cuDNN."""
    ceiling = matrix_rate(stage)
    yield Line("matrix rate", f"{ceiling / 1e12:.0f} TFLOP/s", figures={"flops": ceiling})
    for length in (stage.size(8192, 24), stage.size(2048, 16)):
        yield PrefillBench(stage, length).line(ceiling)


class PrefillBench:
    """A causal prompt in scattered blocks."""

    def __init__(self, stage: Stage, length: int) -> None:
        self.stage, self.length = stage, length
        width = -(-length // BLOCK)
        self.kv = stage.random_bf16((width, 2, KV_HEADS, BLOCK, DIM))
        self.q = stage.random_bf16((length, HEADS, DIM))
        self.output: Any = stage.device.empty((length, HEADS, DIM), np.uint16)
        self.table = np.random.default_rng(8).permutation(width).astype(np.int32)[None]

    def line(self, ceiling: float) -> Line:
        """Ours, then the peers; ``ceiling``: operations per second of large products."""
        peers = {"SDPA cuDNN": "CUDNN_ATTENTION", "SDPA flash": "FLASH_ATTENTION"}
        found = {name: partial(self._sdpa, name, how) for name, how in peers.items()}
        runners, refused = entered(found if has_torch() else {})
        times = race(self.stage, [self.own(self.stage.device), *runners])
        flops = 2 * HEADS * DIM * self.length * (self.length + 1)
        line = verdict(f"prefill of {self.length}", times, Bars(flops / ceiling), refused)
        rate = flops / times["ours"].median
        return Line(
            line.what, f"{rate / 1e12:.0f} TFLOP/s, {line.result}", line.bar, line.state,
            {**line.figures, "flops": rate},
        )  # fmt: skip

    def own(self, device: Device) -> Runner:
        """Ours on the stage's device or a tuned form of it, into :attr:`output`."""
        backend = CudaBackend(device)
        offsets = np.array([0, self.length], np.int32)
        positions = np.arange(self.length, dtype=np.int32)
        plan = backend.plan_attention(offsets, positions)
        tables, rows, at = (device.upload(a) for a in (self.table, offsets, positions))

        def work() -> None:
            backend.attention(self.q, self.kv, tables, rows, at, SCALE, 0, self.output, plan)

        return own(replace(self.stage, device=device), [work], 2)

    def _sdpa(self, name: str, backend: str) -> Runner:
        """Over keys and values without pages: an easier problem than ours."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        queries = as_torch(self.q).transpose(0, 1)[None]
        both = as_torch(self.kv).permute(1, 2, 0, 3, 4).reshape(2, 1, KV_HEADS, -1, DIM)
        keys, values = both[..., : self.length, :]
        best = getattr(SDPBackend, backend) if self.stage.cupy is not None else SDPBackend.MATH

        def call() -> None:
            with sdpa_kernel(best):
                torch.nn.functional.scaled_dot_product_attention(
                    queries, keys, values, scale=SCALE, is_causal=True, enable_gqa=True
                )

        return of_torch(self.stage, name, [call])
