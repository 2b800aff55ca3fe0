"""An ended benchmark leaves no files."""

import os
import signal
import subprocess
import sys

import pytest

MEASURE = """
import time
from baton.benchmarks.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "weights").write_bytes(bytes(100))
    print("measuring", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_its_folder_is_gone_when_a_signal_ends_it(tmp_path, number):
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", MEASURE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    ) as benchmark:
        assert benchmark.stdout.readline() == b"measuring\n"
        assert len(list(tmp_path.iterdir())) == 1
        benchmark.send_signal(number)
        benchmark.send_signal(number)  # an impatient one does not cut the cleaning short
        assert benchmark.wait(30) == 128 + number
        assert benchmark.stderr.read() == b""
    assert list(tmp_path.iterdir()) == []
