"""Probes that need a GPU: limits of the hardware, behaviour of CuPy, CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from baton.engine.kernels.bfloat16 import bfloat16_bits
from baton.engine.kernels.cuda.elementwise import silu_mul

from .lines import FAILED, Line, checked, skipped
from .stage import Stage, readable

_ONE_NODE = 1000
_SM_90A = """
extern "C" __global__ void __launch_bounds__(128, 1) k(float* a) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    a[threadIdx.x] = 1;
}
"""


def probes(stage: Stage) -> Iterator[Line]:
    """One line per question; a question that raises does not keep the next from being asked."""
    questions: list[tuple[str, Callable[[Stage], Line]]] = [
        ("device memory to device memory", copy_rate),
        ("a captured product gives what its arrays hold", captured_product),
        ("bf16 products by rows", product_rates),
        ("what a launch and a graph's node cost", launch_cost),
        ("another process reads memory through CUDA IPC", other_process),
        ("sm_90a by a compiler option", sm_90a),
        ("CuPy's product while a graph is captured", cupy_product_in_graph),
        ("pinned copies", pinned_copies),
    ]
    for what, ask in questions:
        try:
            yield ask(stage)
        except Exception as error:
            yield Line(what, f"{type(error).__name__}: {str(error)[:200]}", state=FAILED)


def copy_rate(stage: Stage) -> Line:
    """Read and write; several times the L2."""
    nbytes = stage.size(2 << 30, 1 << 12)
    source, target = (stage.device.zeros((nbytes,), np.uint8) for _ in range(2))
    time = stage.time([lambda: stage.copy(target, source)], 20)
    rate = 2 * nbytes / time.median
    return Line(
        "device memory to device memory",
        f"{rate / 1e12:.2f} TB/s read and written",
        figures={"bytes_per_s": rate},
    )


def captured_product(stage: Stage) -> Line:
    """More rows than the own kernel takes, so that cuBLAS is captured."""
    device, rows, depth, width = stage.device, 64, 256, 128
    rng = np.random.default_rng(1)
    x: Any = device.zeros((rows, depth), np.uint16)
    weight = rng.standard_normal((width, depth), np.float32)
    there = device.upload(bfloat16_bits(weight))
    out = device.empty((rows, width), np.float32)
    graph = device.capture(lambda: device.matmul(x, there, out))
    worst = 0.0
    for _ in range(2):
        values = rng.standard_normal((rows, depth), np.float32)
        device.write(x, bfloat16_bits(values))
        graph.replay()
        exact = values @ weight.T
        worst = max(worst, float(np.abs(device.download(out) - exact).max() / exact.std()))
    what = "a captured product gives what its arrays hold"
    return checked(what, worst < 0.05, f"worst error {worst:.1e} of a deviation", "5e-2")


def product_rates(stage: Stage) -> Line:
    """Weights of a Llama-3.1-8B's MLP, rotated so that none stays in the cache."""
    device = stage.device
    depth, width = stage.size(4096, 64), stage.size(14336, 64)
    weights = [stage.random_bf16((width, depth), seed=i) for i in range(stage.size(4, 1))]
    found, figures = list[str](), dict[str, float]()
    for rows in (1, 16, 64, 256, stage.size(8192, 24)):
        x, out = stage.random_bf16((rows, depth)), device.empty((rows, width), np.uint16)
        works = [lambda w=w, x=x, out=out: device.matmul(x, w, out) for w in weights]
        time = stage.time(works, 20).median
        flops = 2 * rows * depth * width / time
        found.append(f"{rows}: {readable(time)}")
        figures |= {f"seconds_{rows}": time, f"flops_{rows}": flops}
    found.append(f"{flops / 1e12:.0f} TFLOP/s")
    return Line("bf16 products by rows", ", ".join(found), figures=figures)


def launch_cost(stage: Stage) -> Line:
    """Host seconds of a launch, and device seconds of each of many nodes in a row."""
    device, count = stage.device, stage.size(_ONE_NODE, 4)
    gate_up, out = device.zeros((1, 16), np.uint16), device.zeros((1, 8), np.uint16)

    def many() -> None:
        for _ in range(count):
            silu_mul(device, gate_up, out)

    launch = stage.time([many], 5).median / count
    graph = device.capture(many)
    node = stage.time([graph.replay], 20).median / count
    result = f"launch {readable(launch)}, node {readable(node)}"
    figures = {"launch_s": launch, "node_s": node}
    return Line("what a launch and a graph's node cost", result, figures=figures)


def other_process(stage: Stage) -> Line:
    """A child opens the handle and returns the sum of the memory."""
    what = "another process reads memory through CUDA IPC"
    if stage.cupy is None:
        return skipped(what, "needs a GPU")
    array: Any = stage.device.shareable((1 << 18,), np.uint32)
    stage.device.write(array, np.arange(1 << 18, dtype=np.uint32))
    stage.device.synchronize()
    handle, offset = stage.device.export(array)
    ticket = json.dumps([handle.hex(), offset, stage.factory])
    command = [sys.executable, "-P", "-m", __name__, ticket]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    wanted = str((1 << 18) * ((1 << 18) - 1) // 2)
    words = run.stdout.strip() or run.stderr.strip()[-200:]
    return checked(what, run.stdout.strip() == wanted, f"sum {words}", wanted)


def read_and_tell(ticket: str) -> int:
    """In the child: return the sum of the memory of a handle."""
    from pathlib import Path

    from .child import named

    handle, offset, factory = json.loads(ticket)
    stage: Stage = named(factory)(Path())
    mapping, array = stage.device.open(bytes.fromhex(handle), offset, (1 << 18,), np.uint32)
    total = int(stage.device.download(array).astype(np.uint64).sum())
    del array
    mapping.close()
    return total


def sm_90a(stage: Stage) -> Line:
    """CuPy appends its own -arch; the compiler takes the first."""
    what, cupy = "sm_90a by a compiler option", stage.cupy
    if cupy is None:
        return skipped(what, "needs a GPU")
    if cupy.cuda.Device().compute_capability != "90":
        return skipped(what, "not a Hopper")
    kernel = cupy.RawKernel(_SM_90A, "k", options=("-arch=sm_90a",))
    ones = cupy.zeros(128, np.float32)
    kernel((1,), (128,), (ones,))
    return Line(what, "works" if float(ones.sum()) == 128 else "gives garbage")


def cupy_product_in_graph(stage: Stage) -> Line:
    """Why :mod:`.cublas` exists: should this work one day, it can go."""
    what, cupy = "CuPy's product while a graph is captured", stage.cupy
    if cupy is None:
        return skipped(what, "needs a GPU")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.ones((64, 64), np.float32)
        out = cupy.matmul(x, x)
        stream.synchronize()
        stream.begin_capture()
        try:
            cupy.matmul(x, x, out=out)
            result = "works"
        except Exception as error:
            result = f"refused: {type(error).__name__}"
        finally:
            stream.end_capture()
    return Line(what, result)


def pinned_copies(stage: Stage) -> Line:
    """Host memory to device memory and back."""
    what, cupy = "pinned copies", stage.cupy
    if cupy is None:
        return skipped(what, "needs a GPU")
    nbytes = stage.size(1 << 30, 1 << 16)
    array: Any = stage.device.empty((nbytes,), np.uint8)
    host = stage.device.host_buffer((nbytes,), np.uint8)
    runtime, stream = cupy.cuda.runtime, stage.device.stream  # type: ignore[attr-defined]
    rates = {}
    for name, kind in (("to_device", 1), ("to_host", 2)):
        there, here = array.data.ptr, host.ctypes.data
        to, of = (there, here) if kind == 1 else (here, there)
        work = lambda to=to, of=of, kind=kind: runtime.memcpyAsync(  # noqa: E731
            to, of, nbytes, kind, stream.ptr
        )
        rates[name] = nbytes / stage.time([work], 5, 1).median
    result = ", ".join(
        f"{name.replace('_', ' ')} {rate / 1e9:.1f} GB/s" for name, rate in rates.items()
    )
    return Line(what, result, figures=rates)


if __name__ == "__main__":
    print(read_and_tell(sys.argv[1]))
