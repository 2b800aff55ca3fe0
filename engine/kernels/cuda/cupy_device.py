"""The device through CuPy: arrays of its memory pool, kernels compiled by NVRTC at first use."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ....proto.errors import ConfigError
from .device import Argument, Array, DeviceArray, Kernel
from .sources import cuda_source

_PLAIN_SHARED_BYTES = 48 * 1024
_OPTIONS = ("-std=c++17",)


def cuda_is_available() -> bool:
    """Whether CuPy is installed and finds a GPU; never raises."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy  # pyright: ignore[reportMissingImports]

    return bool(cupy.cuda.is_available())


class CupyDevice:
    """One GPU; see :class:`~baton.engine.kernels.cuda.device.Device`.

    Launches go to CuPy's current stream. Raises ConfigError without CuPy or without a GPU.
    """

    def __init__(self, ordinal: int = 0) -> None:
        if importlib.util.find_spec("cupy") is None:
            raise ConfigError("the CUDA device needs CuPy: pip install 'baton[cuda]'")
        if not cuda_is_available():
            raise ConfigError("CuPy finds no CUDA device: no GPU, or its driver is missing or old")
        import cupy  # pyright: ignore[reportMissingImports]

        count = cupy.cuda.runtime.getDeviceCount()
        if not 0 <= ordinal < count:
            raise ConfigError(f"there is no CUDA device {ordinal}: this machine has {count}")
        self._cupy = cupy
        self._device = cupy.cuda.Device(ordinal)
        self._modules: dict[str, Any] = {}
        self._functions: dict[Kernel, Any] = {}
        capability = self._device.compute_capability
        self.name = f"cuda-sm_{capability}"

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array with undefined content."""
        with self._device:
            array: DeviceArray = self._cupy.empty(tuple(shape), np.dtype(dtype))
        return array

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
        """Make an array of zeros."""
        with self._device:
            array: DeviceArray = self._cupy.zeros(tuple(shape), np.dtype(dtype))
        return array

    def upload(self, array: Array) -> DeviceArray:
        """Copy a NumPy array to the device, in row-major order."""
        with self._device:
            copy: DeviceArray = self._cupy.array(array, order="C")
        return copy

    def download(self, array: DeviceArray) -> Array:
        """Copy an array to the host; waits for what was queued before."""
        with self._device:
            copy: Array = self._cupy.asnumpy(array)
        return copy

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel on the current stream."""
        values = tuple(np.uint64(0) if a is None else a for a in args)
        with self._device:
            function = self._function(kernel, shared_bytes)
            function(tuple(grid), tuple(block), values, shared_mem=shared_bytes)

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""
        self._device.synchronize()

    def _function(self, kernel: Kernel, shared_bytes: int) -> Any:
        function = self._functions.get(kernel)
        if function is None:
            module = self._modules.get(kernel.source)
            if module is None:
                module = self._cupy.RawModule(code=cuda_source(kernel.source), options=_OPTIONS)
                self._modules[kernel.source] = module
            function = self._functions[kernel] = module.get_function(kernel.name)
        # More than 48 KiB must be asked for once; the attribute stays with the function.
        if shared_bytes > max(_PLAIN_SHARED_BYTES, function.max_dynamic_shared_size_bytes):
            function.max_dynamic_shared_size_bytes = shared_bytes
        return function
