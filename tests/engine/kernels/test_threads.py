"""Calls whose work several threads share: the same bits, and helpers that harm nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend

from ...processes import wait_until
from .quantized_cases import random_weights

pytest.importorskip("baton.engine.kernels._cpu")

COUNTS = (2, 3, 7)
LARGE = 256
"""Rows or columns that make the smallest of the matrices here worth sharing."""


def floats(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def halves(rng, *shape):
    return (floats(rng, *shape).view(np.uint32) >> 16).astype(np.uint16)


def linear(kind, rows, out, columns, biased):
    """Out of whole and partial panels; ``rows`` from a single one to several groups."""

    def call(kernels, rng):
        weights = [kind(rng, out - 7, columns), kind(rng, 7, columns)]
        packed = kernels.pack_linear(weights, floats(rng, out) if biased else None)
        y = np.full((rows, out), np.nan, np.float32)
        kernels.linear(floats(rng, rows, columns), packed, y)
        return y

    return call


def quantized(rows):
    """Two kinds in one matrix, both with a partial panel."""

    def call(kernels, rng):
        weights = [random_weights(rng, kind, 777, 1024) for kind in ("Q4_K", "Q6_K")]
        packed = kernels.pack_linear(weights, floats(rng, 2 * 777))
        out = np.full((rows, 2 * 777), np.nan, np.float32)
        kernels.linear(floats(rng, rows, 1024), packed, out)
        return out

    return call


def gated_mlp(rows):
    def call(kernels, rng):
        up, down = (
            kernels.pack_linear([halves(rng, 2 * 544, LARGE)], floats(rng, 2 * 544)),
            kernels.pack_linear([halves(rng, LARGE, 544)]),
        )
        space = np.empty((rows, 2 * 544), np.float32), np.empty((rows, 544), np.float32)
        out = np.full((rows, LARGE), np.nan, np.float32)
        kernels.gated_mlp(floats(rng, rows, LARGE), up, down, *space, out)
        return out

    return call


def convolve(kernels, rng):
    weight = kernels.pack_linear([floats(rng, 130, 5 * LARGE)], floats(rng, 130))
    out = np.full((200, 130), np.nan, np.float32)
    kernels.convolve(floats(rng, 204, LARGE), weight, out)
    return out


def attention(lengths, window=0, halved=False, heads=(6, 2), dim=64):
    """``lengths``: rows and last position of each sequence."""

    def call(kernels, rng):
        count = sum(-(-(last + 1) // 16) for _, last in lengths)
        kv = floats(rng, count, 2, heads[1], 16, dim)
        tables = np.zeros(
            (len(lengths), max(-(-(last + 1) // 16) for _, last in lengths)), np.int32
        )
        ids, at = rng.permutation(count).astype(np.int32), 0
        for table, (_, last) in zip(tables, lengths, strict=True):
            size = -(-(last + 1) // 16)
            table[:size], at = ids[at : at + size], at + size
        positions = np.concatenate([np.arange(last + 1 - n, last + 1) for n, last in lengths])
        offsets = np.cumsum([0, *(n for n, _ in lengths)]).astype(np.int32)
        q = floats(rng, len(positions), heads[0], dim)
        out = np.full((len(q), heads[0] * dim), np.nan, np.float32)
        kernels.attention(
            q, kv, tables, offsets, positions.astype(np.int32), 0.125, window, out, halves=halved
        )
        return out

    return call


def dense_attention(kernels, rng):
    """Three heads, so that rows are divided too."""
    out = np.full((900, 3 * 40), np.nan, np.float32)
    kernels.dense_attention(
        floats(rng, 900, 3, 40), floats(rng, 2, 3, 333, 40), floats(rng, 1, 900, 333), 0.2, out
    )
    return out


def rotation(kernels, rng):
    rows, dim = 301, 64
    q, kv = np.zeros((rows, 8, dim), np.float32), np.zeros((20, 2, 4, 16, dim), np.float32)
    positions = rng.integers(0, 500, rows).astype(np.int32)
    slots = rng.permutation(320)[:rows].astype(np.int64)
    norm = floats(rng, dim)
    kernels.qk_norm_rope_append(
        floats(rng, rows, 16 * dim),
        positions,
        slots,
        floats(rng, 500, dim),
        norm,
        norm,
        1e-6,
        kv,
        q,
    )
    return np.concatenate([q.reshape(-1), kv.reshape(-1)])


def rows(name, *names, width=1000, wider=1):
    """A kernel of rows; ``names``: its arguments beside input and output."""

    def call(kernels, rng):
        x, y = floats(rng, 301, width * wider), np.full((301, width), np.nan, np.float32)
        residual = floats(rng, 301, width)
        known = {"residual": residual, "weight": floats(rng, width), "bias": floats(rng, width)}
        values = [1e-5 if each == "eps" else known.get(each, each) for each in names]
        getattr(kernels, name)(x, *values, y)
        return np.concatenate([y, residual])

    return call


CALLS = {
    "floats, one row": linear(floats, 1, 777, LARGE, biased=True),
    "floats, five rows": linear(floats, 5, 777, 2 * LARGE + 3, biased=False),
    "floats, many rows": linear(floats, 67, 500, LARGE, biased=True),
    "fewer panels than threads": linear(floats, 300, 33, 999, biased=True),
    "halves, one row": linear(halves, 1, 1001, LARGE + 5, biased=False),
    "halves, 16 rows": linear(halves, 16, 777, LARGE, biased=True),
    "halves, many rows": linear(halves, 333, 500, LARGE, biased=True),
    "quantized, one row": quantized(1),
    "quantized, many rows": quantized(77),
    "gated MLP, one row": gated_mlp(1),
    "gated MLP, many rows": gated_mlp(100),
    "convolution": convolve,
    "attention, prefill": attention([(300, 299)]),
    "attention, decode": attention([(1, last) for last in (900, 3, 64, 63, 500)]),
    "attention, mixed": attention([(1, 700), (150, 400), (1, 15), (77, 76)], window=50),
    "attention, one KV head": attention([(200, 350)], heads=(5, 1), dim=40),
    "attention, halves": attention([(1, 700), (150, 400)], halved=True),
    "dense attention": dense_attention,
    "rotation": rotation,
    "norm": rows("rms_norm", "weight", "eps"),
    "norm of sum": rows("add_rms_norm", "residual", "weight", "eps"),
    "layer norm": rows("add_layer_norm", "residual", "weight", "bias", "eps"),
    "gate": rows("silu_mul", wider=2),
    "gelu": rows("activate", "gelu"),
    "silu": rows("activate", "silu"),
}


@pytest.mark.parametrize("name", CALLS)
def test_bits_do_not_depend_on_the_number_of_threads(compiled, name):
    isa = compiled.numerics.rpartition("-")[2]
    alone = CALLS[name](compiled, np.random.default_rng(3))
    assert np.isfinite(alone).all()
    for count in COUNTS:
        for _ in range(3):
            several = load_backend("cpu", isa=isa, threads=count)
            assert several.threads == count
            shared = CALLS[name](several, np.random.default_rng(3))
            assert shared.tobytes() == alone.tobytes(), count


def test_helpers_take_part():
    kernels = load_backend("cpu", threads=2)
    call = linear(floats, 128, 1024, 512, biased=False)

    def ticks() -> int:
        found = 0
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().strip() == "baton-compute":
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                found += int(fields[11])
        return found

    def works() -> bool:
        call(kernels, np.random.default_rng(0))
        return ticks() > 2

    wait_until(works, what="work of a helper")


def test_engines_of_one_process_share_the_helpers():
    call = CALLS["floats, many rows"]
    alone = call(load_backend("cpu"), np.random.default_rng(3)).tobytes()

    def compute(count: int) -> None:
        kernels = load_backend("cpu", threads=count)
        for _ in range(30):
            assert call(kernels, np.random.default_rng(3)).tobytes() == alone

    with ThreadPoolExecutor(4) as several:
        for done in [several.submit(compute, count) for count in (1, 2, 3, 4)]:
            done.result()


def test_only_the_calling_thread_watches_and_a_stop_ends_the_call(compiled):
    isa = compiled.numerics.rpartition("-")[2]
    kernels = load_backend("cpu", isa=isa, threads=3)
    q, kv = np.ones((3000, 2, 16), np.float32), np.ones((2, 2, 3000, 16), np.float32)
    out, seen = np.zeros((3000, 32), np.float32), []

    class Stop(Exception):
        pass

    def stop():
        seen.append(threading.get_ident())
        raise Stop

    def stopped() -> bool:
        """False if helpers took every part that was long enough."""
        try:
            kernels.dense_attention(q, kv, None, 0.25, out, stop)
        except Stop:
            return True
        return False

    wait_until(stopped, what="a call that was stopped")
    assert set(seen) == {threading.get_ident()}
    kernels.dense_attention(q, kv, None, 0.25, out, lambda: None)
    np.testing.assert_allclose(out, 1.0, 1e-5)


def in_process(text: str) -> str:
    """Run a program with numpy, ``load_backend`` and the calls of this file; return its output."""
    program = f"""
import os, resource, signal, sys, time
import numpy as np
from baton.engine.kernels.load import load_backend
from tests.engine.kernels.test_threads import CALLS

call = CALLS["floats, many rows"]
alone = call(load_backend("cpu"), np.random.default_rng(3)).tobytes()
{textwrap.dedent(text)}
"""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_process_starts_helpers_of_its_own():
    """The parent's helpers do not exist in the child; a call that relied on them would hang."""
    out = in_process("""
        import threading
        kernels = load_backend("cpu", threads=3)
        stop = threading.Event()

        def compute():
            while not stop.is_set():
                assert call(kernels, np.random.default_rng(3)).tobytes() == alone

        thread = threading.Thread(target=compute)
        thread.start()
        for _ in range(10):
            child = os.fork()
            if not child:
                signal.alarm(60)
                for _ in range(3):
                    good = call(kernels, np.random.default_rng(3)).tobytes() == alone
                os._exit(0 if good else 3)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        thread.join()
        print("ended")
    """)
    assert out == "ended\n"


def test_with_refused_threads_the_others_compute():
    """Memory for the stacks of about ten threads."""
    out = in_process("""
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20), resource.RLIM_INFINITY))
        kernels = load_backend("cpu", threads=200)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(kernels.threads)
        assert call(kernels, np.random.default_rng(3)).tobytes() == alone
    """)
    assert 1 <= int(out) < 200


def test_idle_helpers_use_no_processor():
    out = in_process("""
        kernels = load_backend("cpu", threads=4)
        call(kernels, np.random.default_rng(3))
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(1)
        print(time.process_time() - before)
    """)
    assert float(out) < 0.2


@pytest.mark.parametrize("count", [0, -1, 257])
def test_impossible_numbers_of_threads_are_refused(count):
    with pytest.raises(ValueError, match="1 to 256"):
        load_backend("cpu", threads=count)
