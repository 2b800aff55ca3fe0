"""cuBLAS through its own functions: one handle on one stream, with a workspace of this module.

CuPy's binding rejects every call while its stream is captured; the library does not. With a
preset workspace, a product allocates nothing, so a graph may contain it. Two graphs of
one device can share the workspace only because one stream runs them one after the other.
"""

from __future__ import annotations

import ctypes
from functools import cache

WORKSPACE_BYTES = 32 << 20
"""Size that NVIDIA's documentation of cublasSetWorkspace recommends for Hopper."""

_CUDA_R_32F, _CUDA_R_16BF = 0, 14
_COMPUTE_32F, _GEMM_DEFAULT = 68, -1
_OP_N, _OP_T = 0, 1
_NO_REDUCED_PRECISION_REDUCTION = 16
_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES = {
    "cublasCreate_v2": (ctypes.POINTER(_POINTER),),
    "cublasDestroy_v2": (_POINTER,),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, _SIZE),
    "cublasSetMathMode": (_POINTER, _INT),
    "cublasGetVersion_v2": (_POINTER, ctypes.POINTER(_INT)),
    "cublasGemmEx": (
        _POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT,
        _INT, _POINTER, _POINTER, _INT, _INT, _INT, _INT,
    ),
}  # fmt: skip


class CublasFailed(RuntimeError):
    """A cuBLAS function returned a status other than success."""


@cache
def find_library() -> str:
    """Return the path of the cuBLAS that this process has loaded, or would load.

    Raises RuntimeError if cuBLAS is not installed.
    """
    # This package is installed with CuPy.
    from cuda.pathfinder import (  # pyright: ignore[reportMissingImports]
        load_nvidia_dynamic_lib,
    )

    path: str | None = load_nvidia_dynamic_lib("cublas").abs_path
    if path is None:
        raise RuntimeError("cuBLAS is not installed")
    return path


class Cublas:
    """A cuBLAS handle for ``stream``, whose device must be the current one.

    ``workspace``: device address of :data:`WORKSPACE_BYTES` bytes, kept alive by the caller.
    Raises CublasFailed. Not thread-safe.
    """

    def __init__(self, library: str, stream: int, workspace: int) -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._handle = _POINTER()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, stream)
        # Setting the stream resets the workspace, so the workspace is set second.
        self._call("cublasSetWorkspace_v2", self._handle, workspace, WORKSPACE_BYTES)
        # By default, products that are split along K may add up their parts in bf16.
        self._call("cublasSetMathMode", self._handle, _NO_REDUCED_PRECISION_REDUCTION)
        self._one, self._onto = ctypes.c_float(1.0), (ctypes.c_float(0.0), ctypes.c_float(1.0))

    @property
    def version(self) -> int:
        """Version of the library: 130101 is 13.1.1."""
        found = _INT()
        self._call("cublasGetVersion_v2", self._handle, ctypes.byref(found))
        return found.value

    def close(self) -> None:
        """Destroy the handle. No other method may be called afterwards."""
        handle, self._handle = self._handle, _POINTER()
        if handle:
            self._call("cublasDestroy_v2", handle)

    def matmul(
        self,
        x: int,
        weight: int,
        out: int,
        sizes: tuple[int, int, int],
        *,
        stride: int,
        wide: bool,
        add: bool,
    ) -> None:
        """Queue ``out[m, N] = x[m, K] @ weight[N, K].T``; ``add`` adds to ``out``.

        Arguments are device addresses; ``sizes`` are m, N, K; ``stride``: from one row of ``out``
        to the next. ``x`` and ``weight`` are bf16;
        ``out`` is float32 if ``wide``, else bf16. Sums are float32. cuBLAS 13.1 was seen to round a
        product to bf16 before it adds it to ``out`` in bf16.
        """
        rows, width, depth = sizes
        # cuBLAS is column-major: out.T = weight @ x.T.
        self._call(
            "cublasGemmEx", self._handle, _OP_T, _OP_N, width, rows, depth,
            ctypes.addressof(self._one), weight, _CUDA_R_16BF, depth, x, _CUDA_R_16BF, depth,
            ctypes.addressof(self._onto[add]), out, _CUDA_R_32F if wide else _CUDA_R_16BF, stride,
            _COMPUTE_32F, _GEMM_DEFAULT,
        )  # fmt: skip

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasFailed(f"{name} returned status {status}")
