"""Maps for the bulk copy engine: asked of the driver, and passed to a kernel by value."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.engine.kernels.cuda.driver import driver_tensor_map
from baton.proto.errors import ConfigError

PROMPTS = """
import numpy as np
from baton.engine.kernels.cuda.cupy_device import CupyDevice
from baton.engine.kernels.cuda.reference import to_bf16
from baton.engine.kernels.cuda.attention import prefill_attention
from baton.engine.kernels.cuda.attention_plan import plan_prefill
from baton.engine.kernels.cuda.tuning import Tuning

device, rng = CupyDevice(), np.random.default_rng(4)
rows, start = 20, 280
blocks = -(-(start + rows) // 16)
positions = np.arange(start, start + rows, dtype=np.int32)
pool = to_bf16(rng.standard_normal((blocks + 2, 2, 2, 16, 64)))
table = rng.permutation(blocks + 2)[:blocks].astype(np.int32)[None]
q = to_bf16(rng.standard_normal((rows, 4, 64)))
plan = plan_prefill(np.array([0, rows], np.int32), positions, 2, 0)
given = [device.upload(each) for each in (q, pool, table, positions, plan)]
outs = []
for kind in ("wgmma", "bulk", "bulk"):
    out = device.empty(q.shape, np.uint16)
    prefill_attention(device.tuned(Tuning(prefill=kind)), *given, 0.1, 0, out)
    outs.append(device.download(out))
assert (outs[0] == outs[1]).all() and (outs[1] == outs[2]).all() and outs[0].any()
print(len(device._maps))
"""


def test_a_worker_asks_the_driver_for_one_map_of_a_layer(with_cupy: dict[str, str]) -> None:
    if not with_cupy:
        pytest.skip("on a GPU tests/cuda/test_prefill_wgmma.py does the same")
    command = [sys.executable, "-P", "-c", PROMPTS]
    run = subprocess.run(command, env=with_cupy, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "1"


REFUSED = """
from baton.engine.kernels.cuda.cupy_device import driver_tensor_map
from baton.proto.errors import ConfigError

try:
    driver_tensor_map(8, 64, 128, 16)
except ConfigError as error:
    print(error)
"""


def test_a_map_that_the_driver_refuses_is_one_sentence(with_cupy: dict[str, str]) -> None:
    """The address is not aligned to 16 bytes."""
    command = [sys.executable, "-P", "-c", REFUSED]
    run = subprocess.run(command, env=with_cupy, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "the CUDA driver makes no map for bulk copies: error 1"


def test_without_a_driver_there_is_no_map() -> None:
    with pytest.raises(ConfigError, match=r"has no maps for bulk copies|makes no map"):
        driver_tensor_map(8, 64, 128, 16)
