"""What cuBLAS is called with, by a library of the same functions on host memory."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

from baton.engine.kernels.cuda.cublas import WORKSPACE_BYTES, Cublas, CublasFailed
from baton.engine.kernels.cuda.reference import from_bf16, to_bf16

from .host.builder import COMPILER, HERE, why_not


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if reason := why_not():
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("cublas") / "libcublas.so"
    command = [COMPILER, "-O2", "-shared", "-fPIC", "-o", str(path), str(HERE / "cublas.cc")]
    subprocess.run(command, check=True)
    return str(path)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_products_have_their_rows_and_columns_in_place(
    library: str, rng: np.random.Generator, wide: bool, add: bool
) -> None:
    """The product goes into some columns of a larger array; the others stay."""
    rows, width, depth, first, stride = 19, 11, 24, 3, 17
    x, weight = (to_bf16(rng.standard_normal((n, depth))) for n in (rows, width))
    larger = rng.standard_normal((rows, stride)).astype(np.float32)
    whole = larger.copy() if wide else to_bf16(larger)
    out, before = (array[:, first : first + width] for array in (whole, larger))
    handle = Cublas(library, stream=1, workspace=WORKSPACE_BYTES)
    at = [array.ctypes.data for array in (x, weight, out)]
    handle.matmul(at[0], at[1], at[2], (rows, width, depth), stride=stride, wide=wide, add=add)
    handle.close()
    expected = from_bf16(x) @ from_bf16(weight).T
    expected += (before if wide else from_bf16(to_bf16(before))) if add else 0
    np.testing.assert_allclose(out if wide else from_bf16(out), expected, 1e-2, 5e-2)
    kept = np.delete(whole, slice(first, first + width), 1)
    others = np.delete(larger, slice(first, first + width), 1)
    assert np.array_equal(kept, others if wide else to_bf16(others))


def test_the_library_names_its_version(library: str) -> None:
    handle = Cublas(library, stream=1, workspace=WORKSPACE_BYTES)
    assert handle.version == 130101
    handle.close()


def test_a_status_becomes_an_error(library: str) -> None:
    handle = Cublas(library, stream=1, workspace=0)
    with pytest.raises(CublasFailed, match="cublasGemmEx returned status 1"):
        handle.matmul(0, 0, 0, (1, 1, 1), stride=1, wide=True, add=False)
    handle.close()


def test_the_functions_are_those_of_the_library_that_cupy_brings() -> None:
    """Where cuBLAS is installed; without a GPU it makes no handle, and raises an error."""
    pytest.importorskip("cuda.pathfinder")
    from baton.engine.kernels.cuda import cublas

    try:
        path = cublas.find_library()
    except Exception as error:  # pathfinder's own
        pytest.skip(f"no cuBLAS: {error}")
    try:
        Cublas(path, stream=0, workspace=0).close()
    except CublasFailed as error:
        assert "cublasCreate_v2 returned status 1" in str(error)
