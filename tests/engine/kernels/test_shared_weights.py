"""Packed weights that processes share: who fills the memory, and what is never used."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from baton.engine.kernels.load import load_backend
from baton.engine.kernels.shared_weights import (
    HEAD_BYTES,
    HUGE_PAGE,
    OtherWeights,
    faults_give_huge_pages,
    has_huge_pages,
    new_memory,
)

pytest.importorskip("baton.engine.kernels._cpu")
LIMIT = 1 << 22


@pytest.fixture
def memory():
    fd = new_memory()
    yield fd
    os.close(fd)


def matrices(seed: int = 1):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in ((70, 33), (16, 64), (5, 8))]


def load(memory, key="model", seed=1, count=3, kernels=None):
    """Pack the matrices in shared memory; return the kernels and the packed matrices."""
    kernels = kernels or load_backend("cpu")
    with kernels.sharing(memory, key, LIMIT):
        packed = [kernels.pack_linear([matrix]) for matrix in matrices(seed)[:count]]
    return kernels, packed


def products(kernels, packed):
    found = []
    for weight in packed:
        x = np.ones((2, weight.in_features), np.float32)
        y = np.empty((2, weight.out_features), np.float32)
        kernels.linear(x, weight, y)
        found.append(y)
    return np.concatenate([y.ravel() for y in found])


def private():
    kernels = load_backend("cpu")
    return products(kernels, [kernels.pack_linear([matrix]) for matrix in matrices()])


def test_the_second_worker_reads_what_the_first_one_packed(memory):
    first = load(memory)
    second = load(memory, seed=2)  # its own matrices would give other products
    for kernels, packed in (first, second):
        assert products(kernels, packed).tobytes() == private().tobytes()
        assert kernels.shared_bytes == os.fstat(memory).st_size - HEAD_BYTES > 0
        assert not any(weight.panels.flags.writeable for weight in packed)


def test_nobody_can_change_the_memory(memory):
    load(memory)
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", HEAD_BYTES)
    with pytest.raises(PermissionError):
        mmap.mmap(memory, HEAD_BYTES)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    assert fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


@pytest.mark.parametrize("other", [{"key": "another"}, {"count": 2}])
def test_other_weights_are_refused(memory, other):
    load(memory)
    with pytest.raises(OtherWeights):
        load(memory, **other)


def test_another_instruction_set_is_refused(memory):
    load(memory)
    with pytest.raises(OtherWeights):
        load(memory, kernels=load_backend("cpu", isa="plain"))


def test_memory_of_a_worker_that_ended_while_it_packed_is_filled_again(memory):
    child = os.fork()
    if not child:
        kernels = load_backend("cpu")
        with kernels.sharing(memory, "model", LIMIT):
            kernels.pack_linear([matrices(9)[0]])
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.fstat(memory).st_size > 0
    assert products(*load(memory)).tobytes() == private().tobytes()


def test_a_failed_load_leaves_nothing_that_others_use(memory):
    kernels = load_backend("cpu")
    with pytest.raises(RuntimeError), kernels.sharing(memory, "model", LIMIT):
        kernels.pack_linear([matrices(9)[0]])
        raise RuntimeError
    assert products(*load(memory)).tobytes() == private().tobytes()


def test_a_named_file_is_refused(tmp_path):
    path = tmp_path / "weights"
    path.touch()
    with path.open("r+b") as file, pytest.raises(OSError, match="not memory of this user"):
        load(file.fileno())


@pytest.mark.parametrize(
    ("text", "huge"),
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise never [deny] force", False),
    ],
)
def test_huge_pages_of_shared_memory(tmp_path, text, huge):
    path = tmp_path / "shmem_enabled"
    assert not faults_give_huge_pages(path)
    path.write_text(text)
    assert faults_give_huge_pages(path) == huge


def test_all_workers_map_huge_pages_if_the_kernel_makes_them(memory):
    if not has_huge_pages():
        pytest.skip("this kernel makes no huge pages of shared memory")
    weights = np.ones((512, 4096), np.float32)  # 8 MiB: at least three whole huge pages
    for _ in range(2):
        kernels = load_backend("cpu")
        with kernels.sharing(memory, "model", 4 * weights.nbytes):
            packed = kernels.pack_linear([weights])
        products(kernels, [packed])
        mapped = in_huge_pages()
        assert weights.nbytes - 2 * HUGE_PAGE <= mapped <= weights.nbytes
        del kernels, packed


def in_huge_pages() -> int:
    """Bytes of the shared weights that this process maps in huge pages."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = "memfd:baton-weights" in line
        elif ours and line.startswith("ShmemPmdMapped:"):
            found += int(line.split()[1]) << 10
    return found
