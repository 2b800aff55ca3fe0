"""The tests marked `sanitized` once more, with the kernels built by g++'s sanitizers.

Address sanitizer: reads and writes outside arrays, static and dynamic shared memory and stacks.
Undefined-behaviour sanitizer: overflows, shifts, indices, alignment. The library must be there
before Python starts, hence a process of its own, which in a run without workers goes on beside the
other tests from the first of them on (``sanitized_run`` in conftest.py).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from .conftest import ROOT, environment, start_sanitized_run
from .host.builder import HERE, sanitizer

pytestmark = pytest.mark.skipif(
    sanitizer() is None,
    reason="the sanitized run needs g++ and its libasan, which are not there",
)

LAUNCH = """
import sys
import types
from pathlib import Path

import numpy as np

package = types.ModuleType("cuda")
package.__path__ = [sys.argv[1]]
sys.modules["cuda"] = package
from cuda.host_device import HostDevice, Kernel

device = HostDevice(Path(sys.argv[2]), folder=Path(sys.argv[1]) / "host")
name, arguments, shared_bytes = eval(sys.argv[3])
arrays = [device.zeros((32,), np.int32) if a is None else a for a in arguments]
device.launch(Kernel("probe.cu", name), (1,), (32,), arrays, shared_bytes=shared_bytes)
print("nothing seen")
"""


def sanitized(*command, timeout):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.timeout(300)
def test_marked_tests_pass_under_sanitizers(sanitized_run):
    with contextlib.ExitStack() as stack:
        run = sanitized_run or stack.enter_context(start_sanitized_run())
        stack.callback(run.kill)
        output, _ = run.communicate(timeout=280)
    assert run.returncode == 0, output[-6000:]
    assert "passed" in output


@pytest.mark.parametrize(
    ("name", "arguments", "shared_bytes", "message"),
    [
        ("beside", "(None, np.int32(1))", 0, "use-after-poison"),
        ("reads_beside", "(None, None, np.int32(1))", 0, "use-after-poison"),
        ("reads_beside", "(None, None, np.int32(-1))", 0, "use-after-poison"),
        ("reads_behind_shared", "(None, np.int32(1))", 128, "use-after-poison"),
        ("past_static", "(None, np.int32(8))", 0, "index 32 out of bounds"),
        ("overflows", "(None, np.int32(5))", 0, "signed integer overflow"),
    ],
)
def test_a_planted_bug_stops_at_its_line(name, arguments, shared_bytes, message, build_cache):
    case = f"({name!r}, {arguments}, {shared_bytes})"
    run = sanitized("-c", LAUNCH, str(HERE.parent), str(build_cache), case, timeout=110)
    assert run.returncode != 0, run.stdout
    assert message in run.stderr
    lines = (HERE / "probe.cu").read_text().splitlines()
    start = next(i for i, line in enumerate(lines, 1) if f"void {name}(" in line)
    assert any(f"probe.cu:{line}" in run.stderr for line in range(start, start + 10))
