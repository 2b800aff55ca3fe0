"""A cluster on a GPU that fails at a kernel when a test orders it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.benchmarks.checkpoints import write_checkpoint
from baton.benchmarks.scratch import scratch_folder
from baton.benchmarks.served import Served
from baton.client import Client
from baton.proto.sampling import SamplingParams

from ..cuda.small_model import SHAPE

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


def generated(client: Client, prompts: Sequence[list[int]]) -> list[list[int]]:
    streams = [client.generate(prompt, GREEDY) for prompt in prompts]
    return [[token for output in stream for token in output.tokens] for stream in streams]


@contextmanager
def failing_cluster(
    tmp_path: Path,
    environment: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    *flags: str,
) -> Iterator[tuple[Served, Path, Path]]:
    """Yield the cluster, the folder of its model, and the file that orders a failure.

    The worker that runs ``kernel`` next removes the file and fails. ``environment``: with the CuPy
    of :func:`.conftest.with_cupy`, because a real GPU does not fail on demand.
    """
    order = tmp_path / "fail"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BATON_FAKE_GPU_FAILS", f"{kernel}:{order}")
    folder = write_checkpoint(tmp_path / "model", SHAPE, "BF16")
    flags = ("--device=cuda", "--kv-blocks=64", *flags)
    # Paths of sockets are too long below tmp_path.
    with scratch_folder() as place, Served(place, folder, flags=flags) as served:
        yield served, folder, order
