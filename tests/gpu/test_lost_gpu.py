"""A GPU that fails under a whole cluster: its worker is replaced, and no request is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.benchmarks.checkpoints import Shape, write_checkpoint
from baton.benchmarks.served import Served
from baton.client import Client
from baton.proto.sampling import SamplingParams

from ..processes import wait_until

SHAPE = Shape("tiny", vocab=128, hidden=128, intermediate=192, layers=2, heads=2, kv_heads=1)
PROMPTS = [[5, 9, 2] * 7, [3] * 30]
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


def generated(client: Client) -> list[list[int]]:
    streams = [client.generate(prompt, GREEDY) for prompt in PROMPTS]
    return [[token for output in stream for token in output.tokens] for stream in streams]


def pids(client: Client) -> dict[str, int]:
    """Of the workers that are ready."""
    workers = client.status()["workers"]
    return {worker["id"]: worker["pid"] for worker in workers if worker["state"] == "ready"}


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kernel", ["decode_attention", "prefill_attention"])
def test_the_worker_is_replaced_and_its_requests_go_on(
    tmp_path: Path, with_cupy: dict[str, str], monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    order = tmp_path / "fail"
    for name, value in with_cupy.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BATON_FAKE_GPU_FAILS", f"{kernel}:{order}")
    folder = write_checkpoint(tmp_path / "model", SHAPE, "BF16")
    with Served(tmp_path, folder, flags=("--device=cuda", "--kv-blocks=64")) as served:
        undisturbed = generated(served.client)
        before = pids(served.client)
        order.touch()
        assert generated(served.client) == undisturbed
        assert not order.exists()

        def replaced() -> bool:
            now = pids(served.client)
            return len(now) == 2 and now != before

        wait_until(replaced, 60.0)
        assert generated(served.client) == undisturbed
    assert "device lost: CUDARuntimeError: cudaErrorIllegalAddress" in served.log.read_text()
