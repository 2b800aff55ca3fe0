"""Which instances of split GPUs (MIG) workers get; listings are in the form of `nvidia-smi -L`."""

from __future__ import annotations

import pytest

from baton.deploy.plan.instances import instances_of, listed_instances, workers_gpus
from baton.deploy.plan.plan import GpuBook
from baton.engine.kernels.backend import Gpu
from baton.engine.loading.runner_config import RunnerConfig
from baton.proto.errors import ConfigError

ONE, TWO, THREE = (f"MIG-{digit * 8}-1f2e-5b6a-9c0d-{digit * 12}" for digit in "abc")
LISTING = f"""\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5e2f90a1-47cb-1d8f-20ee-7c1fd4f0b1aa)
  MIG 3g.40gb     Device  0: (UUID: {ONE})
  MIG 1g.10gb     Device  1: (UUID: {TWO})
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-0d1b6b4e-9e0e-bb1f-7a55-0f6b7d2cc3e4)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-9a3e1f77-2c4d-4f0a-8b59-5a1c0e6d7f21)
  MIG 7g.40gb     Device  0: (UUID: {THREE})
"""
OLDER = """\
GPU 0: A100-SXM4-40GB (UUID: GPU-e3e0c1f2-13a2-7e92-4b3c-1a9f4f7e8c55)
  MIG 3g.20gb Device 0: (UUID: MIG-GPU-e3e0c1f2-13a2-7e92-4b3c-1a9f4f7e8c55/1/0)
  MIG 3g.20gb Device 1: (UUID: MIG-GPU-e3e0c1f2-13a2-7e92-4b3c-1a9f4f7e8c55/2/0)
"""
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"
LISTED = [
    Gpu(0, ONE, f"{H100} MIG 3g.40gb"),
    Gpu(1, TWO, f"{H100} MIG 1g.10gb"),
    Gpu(2, THREE, f"{A100} MIG 7g.40gb"),
]


def ask(shown: str | None) -> list[Gpu]:
    """CUDA: the first instance of a list, whatever else it names."""
    first = ONE if shown is None else shown.split(",")[0]
    found = [gpu for gpu in LISTED if gpu.uuid == first]
    if not found:
        raise ConfigError("CuPy finds no CUDA device")
    return [Gpu(0, found[0].uuid, found[0].name)]


def test_listings_of_two_drivers() -> None:
    assert listed_instances(LISTING) == LISTED
    assert [gpu.uuid[-4:] for gpu in listed_instances(OLDER)] == ["/1/0", "/2/0"]
    assert listed_instances("") == []
    assert listed_instances("GPU 0: Tesla T4 (UUID: GPU-1)\n") == []


def test_all_instances_count_if_nothing_is_named() -> None:
    assert workers_gpus(None, ask, lambda: LISTING) == LISTED
    assert workers_gpus(None, ask, lambda: "") == ask(None)  # no nvidia-smi


def test_unsplit_gpus_are_as_cuda_shows_them() -> None:
    whole = [Gpu(0, "GPU-1", "one"), Gpu(1, "GPU-2", "two")]
    assert workers_gpus(None, lambda _: whole, lambda: LISTING) == whole
    assert workers_gpus("0,1", lambda _: whole, lambda: LISTING) == whole
    assert instances_of(whole) == {}


def test_instances_that_are_named_are_asked_one_by_one() -> None:
    found = workers_gpus(f"{THREE}, {ONE}", ask, lambda: LISTING)
    assert [(gpu.ordinal, gpu.uuid) for gpu in found] == [(0, THREE), (1, ONE)]
    assert workers_gpus(TWO, ask, lambda: LISTING) == ask(TWO)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (f"0,{ONE}", "2 entries, 1 of them MIG instances"),
        (f"{ONE},{ONE}", "twice"),
        (f"{ONE},MIG-none", "no CUDA device"),
    ],
)
def test_what_cuda_would_ignore_is_refused(shown: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        workers_gpus(shown, ask, lambda: LISTING)


def test_a_worker_per_instance_sees_no_other() -> None:
    assert instances_of(LISTED[:1]) == {}  # every process sees it already
    book = GpuBook((0, 1, 2), instances_of(LISTED))
    names = ("prefill-0", "decode-0", "decode-1", "decode-2")
    given = [book.given(RunnerConfig(model="m", backend="cuda"), name) for name in names]
    assert [each.instance for each in given] == [ONE, TWO, THREE, ONE]
    assert {each.ordinal for each in given} == {0}
    book.release("prefill-0")
    again = book.given(RunnerConfig(model="m", backend="cuda"), "prefill-1")
    assert again.instance == ONE
