"""The parts of the GPU verbs that compute beside torch: their lines with torch, on the CPU.

``tests/gpu`` runs the same parts where torch is not installed, so it skips these lines.
"""

from pathlib import Path

import pytest

from baton.benchmarks.gpu import bench_attention, bench_blocks, bench_rows, oracle, values
from baton.benchmarks.gpu.lines import HELD
from baton.benchmarks.gpu.stage import Stage, WallClock

from ..cuda.host.builder import why_not
from ..cuda.host_device import HostDevice

pytestmark = pytest.mark.oracle
pytest.importorskip("torch", reason="torch is not installed; run make test-oracle")
pytest.importorskip("transformers", reason="transformers is not installed; run make test-oracle")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    if reason := why_not():
        pytest.skip(reason)
    device = HostDevice(tmp_path)
    return Stage(device, WallClock(device), tmp_path, "", tiny=True)


def test_attention_is_torch_s(stage: Stage) -> None:
    lines = list(values.values(stage))
    assert all(line.state == HELD for line in lines), lines
    assert sum(line.what.endswith("torch in float32") for line in lines) == len(lines) / 2


def test_logits_are_near_those_of_transformers(stage: Stage) -> None:
    lines = list(oracle.oracle(stage))
    assert len(lines) == 4 and all(line.state == HELD for line in lines), lines


def peers(lines: list) -> set[str]:
    """Names of the peers that were timed, without our own variants."""
    found = {name for line in lines for name in line.figures if name.endswith(" seconds")}
    names = {name.removesuffix(" seconds") for name in found}
    return (
        names
        - {"a word per thread", "dependent launches"}
        - {f"ring of {n} tiles" for n in range(9)}
    )


def test_every_peer_of_torch_is_timed(stage: Stage) -> None:
    """A peer that raises is named in its line alone, and fails nothing."""
    decode = bench_attention.DecodeBench(stage, 2, 24, 1e9)
    assert peers([decode.line()]) == {"SDPA cuDNN", "SDPA flash", "flex_attention"}
    assert peers(list(bench_attention.prefilling(stage))) == {"SDPA cuDNN", "SDPA flash"}
    assert peers(list(bench_rows.rows(stage))) == {"torch.compile"}
    assert peers(list(bench_rows.products(stage))) == {"torch"}
    assert peers(list(bench_rows.drawing(stage))) == {"torch"}
    assert peers(list(bench_blocks.moving(stage))) == {"torch index"}
