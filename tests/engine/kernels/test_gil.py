"""Only kernels that take long let other threads run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from baton.engine.kernels.backend import Backend

MINUTES = 600.0
"""No thread is made to give the GIL up within a test."""


@pytest.fixture
def no_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(MINUTES)
    yield
    sys.setswitchinterval(before)


class Other:
    """A thread that records when it could run."""

    def __init__(self) -> None:
        self.ran = False
        self._begin = threading.Lock()
        self._begin.acquire()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._begin:
            self.ran = True

    def runs_during(self, call: Callable[[], object], times: int) -> bool:
        """Whether the thread ran during up to ``times`` calls of ``call``."""
        self._begin.release()
        for _ in range(times):
            call()
            if self.ran:
                return True
        return False

    def join(self) -> None:
        self._thread.join()


@pytest.fixture
def other(no_switches: None) -> Iterator[Other]:
    thread = Other()
    yield thread
    thread.join()


def linear(backend: Backend, rows: int, width: int) -> Callable[[], None]:
    weight = backend.pack_linear([np.ones((width, width), np.float32)])
    x, y = np.ones((rows, width), np.float32), np.empty((rows, width), np.float32)
    return lambda: backend.linear(x, weight, y)


def gated_mlp(backend: Backend, rows: int, width: int) -> Callable[[], None]:
    halves = np.full((2 * width, width), 0x3C00, np.uint16)
    gate_up, down = backend.pack_linear([halves]), backend.pack_linear([halves[:width]])
    x, y = np.ones((rows, width), np.float32), np.empty((rows, width), np.float32)
    space = np.empty((rows, 2 * width), np.float32), np.empty((rows, width), np.float32)
    return lambda: backend.gated_mlp(x, gate_up, down, *space, y)


def norm(backend: Backend, rows: int, width: int) -> Callable[[], None]:
    x, weight = np.ones((rows, width), np.float32), np.ones(width, np.float32)
    y = np.empty_like(x)
    return lambda: backend.rms_norm(x, weight, 1e-5, y)


def attention(backend: Backend, positions: int) -> Callable[[], None]:
    """One row that reads ``positions`` positions of 4 heads of 64 channels."""
    blocks = -(-positions // 16)
    kv = np.zeros((blocks, 2, 4, 16, 64), np.float32)
    q, out = np.zeros((1, 4, 64), np.float32), np.empty((1, 256), np.float32)
    tables = np.arange(blocks, dtype=np.int32)[None]
    offsets, at = np.array([0, 1], np.int32), np.array([positions - 1], np.int32)
    return lambda: backend.attention(q, kv, tables, offsets, at, 0.125, 0, out)


@pytest.mark.parametrize(
    "short",
    [
        lambda backend: linear(backend, 1, 256),
        lambda backend: gated_mlp(backend, 1, 256),
        lambda backend: norm(backend, 8, 512),
        lambda backend: attention(backend, 500),
    ],
    ids=["linear", "gated MLP", "norm", "attention"],
)
def test_short_kernels_keep_the_lock(compiled, other, short):
    call = short(compiled)
    linear(compiled, 1, 2048)  # as matrices of a model with long kernels
    assert not other.runs_during(call, 1000)


@pytest.mark.parametrize(
    "long",
    [
        lambda backend: linear(backend, 1, 2048),
        lambda backend: linear(backend, 200, 512),
        lambda backend: gated_mlp(backend, 1, 1024),
        lambda backend: norm(backend, 2048, 2048),
        lambda backend: attention(backend, 4096),
    ],
    ids=["linear of much", "linear of many rows", "gated MLP", "norm", "attention"],
)
def test_long_kernels_let_go(compiled, other, long):
    assert other.runs_during(long(compiled), 2_000)
