"""The kernels of text encoders and picture models on a GPU: ``pictures.cu``, and cuBLAS.

Semantics: :class:`~baton.engine.kernels.host_backend.PictureBackend`. Attention of encoders and of
the VAE has a bias or wide heads, which the attention kernels of decoders lack: it is two products
per head with a softmax between them. Wrong types, shapes or orders raise ValueError before the
launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backend import F32, U8, PackedLinear
from . import elementwise
from .attention import PREFILL_DIMS, prefill_attention
from .attention_plan import plan_prefill
from .backend import CudaBackend, CudaLinear, parameter_bits
from .checks import BF16, check_array, check_multiple
from .device import Argument, Device, DeviceArray, Kernel
from .kept import CapturedWork
from .linear import linear

PATCH_BYTES = 128 << 20
"""Patches of a convolution that are multiplied at once."""
SCORE_BYTES = 64 << 20
"""Scores of an attention that are in memory at once."""
JOINT_HEADS = (64, 128)
"""Head sizes of the transformer's attention, whose norms need powers of two; others are padded."""

_THREADS = 256
_CHUNK = 512
_INT_MAX = 2**31 - 1
_PLANS = 8


class CudaPictures(CudaBackend):
    """:class:`~.backend.CudaBackend` with the kernels of picture models."""

    head_sizes: tuple[int, ...] = JOINT_HEADS

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._plans: dict[tuple[int, int], tuple[DeviceArray, ...]] = {}
        self._work: CapturedWork | None = None  # whose run is under way

    def capture(self, work: Callable[[], None], into: CapturedWork) -> None:
        """Run ``work`` once, then capture it; ``into`` keeps its arrays and its graph.

        ``work`` may allocate by :meth:`empty` and :meth:`parameters`. Raises CaptureFailed, after
        the first run, if the second run cannot become a graph or needs other memory.
        """

        def run() -> None:
            into.begin_run()
            self._work = into
            try:
                work()
            finally:
                self._work = None
            into.end_run()

        into.graph = self.device.capture(run)

    def replay(self, work: CapturedWork, parameters: Sequence[F32]) -> None:
        """Queue captured work again, with other values for its calls of :meth:`parameters`."""
        work.replay([parameter_bits(values) for values in parameters])

    def empty(self, rows: int, columns: int, *, logits: bool = False) -> Any:
        """Return activations bfloat16 ``[rows, columns]``, or float32 for ``logits``."""
        if self._work is None:
            return super().empty(rows, columns, logits=logits)
        return self._work.take((rows, columns), np.float32 if logits else np.uint16)

    def parameters(self, weights: npt.NDArray[Any]) -> Any:
        """Return a bfloat16 copy on the device of float32 values or bfloat16 bits."""
        if self._work is None:
            return super().parameters(weights)
        return self._work.upload(parameter_bits(weights))

    def activations(self, x: Any) -> Any:
        """Return float32 rows ``[T, F]`` as bfloat16."""
        check_array("x", x, np.float32, (None, None))
        check_multiple("the width of x", x.shape[1], elementwise.VECTOR)
        out = self.empty(*x.shape)
        self._each("rounded", out, (x, out), _words(out))
        return out

    # ------------------------------------------------------------------ attention

    def self_attention(self, qkv: Any, heads: int, scale: float, bias: Any, out: Any) -> None:
        """Attention of all rows of one sample to each other, without rotation."""
        check_array("qkv", qkv, BF16, (None, None))
        rows, dim = qkv.shape[0], qkv.shape[1] // (3 * heads)
        check_array("qkv", qkv, BF16, (rows, 3 * heads * dim))
        check_array("out", out, BF16, (rows, heads * dim))
        check_multiple("the head size", dim, elementwise.VECTOR)
        if bias is not None:
            check_array("bias", bias, np.float32, (None, rows, rows))
            if bias.shape[0] not in (1, heads):
                raise ValueError(f"bias has {bias.shape[0]} heads, not 1 or {heads}")
        if not rows:
            return
        padded, words = -(-rows // 8) * 8, dim // 8
        q, k = (self.empty(heads * padded, dim).reshape(heads, padded, dim) for _ in range(2))
        v = self.empty(heads * dim, padded).reshape(heads, dim, padded)
        args = (qkv, q, k, v, *map(np.int32, (rows, padded, heads, words)))
        grid = (-(-heads * padded * words // _THREADS), 3)
        self.device.launch(_kernel("split_heads"), grid, (_THREADS,), args)
        mixed = out if heads == 1 else self.empty(heads * rows, dim)
        mixed = mixed.reshape(heads, rows, dim)
        limit = max(1, SCORE_BYTES // (4 * padded))  # rows of scores
        together, band = max(1, limit // rows), min(rows, limit)
        for head in range(0, heads, together):
            for top in range(0, rows, band):
                several = range(head, min(heads, head + together))
                part = slice(top, min(rows, top + band))
                self._attend(q, k, v, several, part, scale, bias, mixed)
        if heads > 1:
            numbers = (np.int32(rows), np.int32(heads), np.int32(words))
            self._each("merge_heads", out, (mixed, out), _words(out), *numbers)

    def _attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        heads: range,
        part: slice,
        scale: float,
        bias: Any,
        mixed: Any,
    ) -> None:
        """Compute some rows of some heads; several heads only with all their rows."""
        rows, padded, columns = part.stop - part.start, k.shape[1], mixed.shape[1]
        scores = self.empty(len(heads) * rows, padded, logits=True)
        weights = self.empty(len(heads) * rows, padded)
        for i, head in enumerate(heads):
            own = slice(i * rows, (i + 1) * rows)
            linear(self.device, q[head][part], k[head], None, scores[own])
        stride, shifted = 0, None
        if bias is not None:
            stride = columns * columns if bias.shape[0] > 1 else 0
            shifted = bias[heads.start if stride else 0][part]
        args = (
            scores, shifted, weights, np.int32(columns), np.int32(padded // 8), np.float32(scale),
            np.int32(rows), np.int64(stride),
        )  # fmt: skip
        self.device.launch(_kernel("softmax_rows"), (len(scores),), (_THREADS,), args)
        for i, head in enumerate(heads):
            own = slice(i * rows, (i + 1) * rows)
            linear(self.device, weights[own], v[head], None, mixed[head][part])

    def joint_attention(self, q: Any, kv: Any, keys: int, scale: float, out: Any) -> None:
        """Attention of rows to the first ``keys`` keys: the prefill kernel, one block per head."""
        rows, heads, dim = q.shape
        check_array("kv", kv, BF16, (2, heads, None, dim))
        if not 0 < keys <= kv.shape[2]:
            raise ValueError(f"kv has {kv.shape[2]} keys, not {keys}")
        if dim not in PREFILL_DIMS:
            raise ValueError(f"head size {dim} is not one of {PREFILL_DIMS}")
        table, positions, plan = self._plan(rows, keys)
        prefill_attention(
            self.device, q, kv.reshape(1, *kv.shape), table, positions, plan, scale, 0,
            out.reshape(rows, heads, dim),
        )  # fmt: skip

    def _plan(self, rows: int, keys: int) -> tuple[DeviceArray, ...]:
        """Return table, positions and work list of rows that all see ``keys`` keys."""
        key = rows, keys
        if key not in self._plans:
            while len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]
            positions = np.full(rows, keys - 1, np.int32)
            plan = plan_prefill(np.array([0, rows], np.int32), positions, 1, 0)
            arrays = np.zeros((1, 1), np.int32), positions, plan
            self._plans[key] = tuple(self.device.upload(array) for array in arrays)
        return self._plans[key]

    # ------------------------------------------------------------------ rows

    def modulated_norm(self, x: Any, shift: Any, scale: Any, eps: float, out: Any) -> None:
        """``out = layer_norm(x) * (1 + scale) + shift`` per row ``[T, H]``."""
        elementwise.layer_norm(self.device, x, scale, shift, eps, out, modulated=True)

    def add(self, x: Any, residual: Any) -> None:
        """``residual += x`` in place, rounded."""
        self._add(x, None, residual)

    def add_scaled(self, x: Any, scale: Any, residual: Any) -> None:
        """``residual[T, H] += x[T, H] * scale[H]`` in place, rounded once."""
        check_array("scale", scale, BF16, (x.shape[-1],))
        self._add(x, scale, residual)

    def _add(self, x: Any, scale: Any, residual: Any) -> None:
        width = _check_rows(x, residual)
        self._each("add_scaled", x, (x, scale, residual), _words(x), np.int32(width // 8))

    def multiply(self, x: Any, out: Any) -> None:
        """``out *= x`` in place, rounded."""
        _check_rows(x, out)
        self._each("multiply", x, (x, out), _words(x))

    def put_columns(self, x: Any, first: int, out: Any) -> None:
        """``out[:, first : first + F] = x``."""
        check_array("x", x, BF16, (None, None))
        check_array("out", out, BF16, (len(x), None))
        width, wide = x.shape[1], out.shape[1]
        for name, number in (("x", width), ("out", wide)):
            check_multiple(f"the width of {name}", number, elementwise.VECTOR)
        if first % elementwise.VECTOR or not 0 <= first <= wide - width:
            raise ValueError(f"columns {first} to {first + width} do not fit {wide} columns")
        numbers = map(np.int32, (width // 8, wide // 8, first // 8))
        self._each("put_columns", x, (x, out), _words(x), *numbers)

    # ------------------------------------------------------------------ images

    def group_norm(
        self, x: Any, groups: int, weight: Any, bias: Any, eps: float, silu: bool, out: Any
    ) -> None:
        """Normalise ``x[P, C]`` over all rows and the channels of each group."""
        width = _check_rows(x, out)
        rows, words = len(x), width // 8
        for name, array in (("weight", weight), ("bias", bias)):
            check_array(name, array, BF16, (width,))
        if groups < 1 or width % groups:
            raise ValueError(f"{width} columns do not divide into {groups} groups")
        if words > _THREADS:
            raise ValueError(f"x has {width} channels, more than {8 * _THREADS}")
        if not rows:
            return
        chunks, share = -(-rows // _CHUNK), width // groups
        sums = self.device.empty((chunks, width, 2), np.float32)
        stats = self.device.empty((groups, 2), np.float32)
        args: tuple[Argument, ...] = (x, sums, np.int32(rows), np.int32(words), np.int32(_CHUNK))
        self.device.launch(_kernel("group_sums"), (chunks,), (_THREADS,), args)
        numbers = map(np.int32, (rows, chunks, width, share))
        args = (x, sums, stats, *numbers, np.float32(eps))
        self.device.launch(_kernel("group_stats"), (groups,), (_THREADS,), args)
        numbers = map(np.int32, (words, share, silu))
        self._each("group_apply", x, (x, stats, weight, bias, out), _words(x), *numbers)

    def conv2d(
        self, x: Any, weight: PackedLinear, kernel: int, out: Any, *, scale: int = 1
    ) -> None:
        """Convolve ``x[H, W, C]`` into ``out``, bfloat16 or float32: patches of a band of rows."""
        check_array("x", x, BF16, (None, None, None))
        height, width, channels = x.shape
        check_multiple("the channels of x", channels, elementwise.VECTOR)
        columns = kernel * kernel * channels
        if weight.in_features != columns or kernel % 2 == 0:
            raise ValueError(f"a weight of {weight.in_features} columns is not one of {columns}")
        tall, wide, made = height * scale, width * scale, weight.out_features
        if out.shape != (tall, wide, made):
            raise ValueError(f"out has shape {out.shape}")
        if not isinstance(weight, CudaLinear):
            raise ValueError("weight was packed by another backend")  # noqa: TRY004
        step = max(1, PATCH_BYTES // (2 * columns * wide))
        sizes = [np.int32(n) for n in (height, width, channels // 8, kernel, scale)]
        for top in range(0, tall, step):
            rows = min(step, tall - top)
            patches = self.empty(rows * wide, columns)
            words = rows * wide * columns // 8
            args = (x, patches, np.int64(words), *sizes, np.int32(top))
            grid = (-(-words // _THREADS),)
            self.device.launch(_kernel("patches"), grid, (_THREADS,), args)
            band = out[top : top + rows].reshape(rows * wide, made)
            linear(self.device, patches, weight.weight, weight.bias, band)

    def to_pixels(self, image: Any) -> U8:
        """Return the first three channels as bytes ``[h, w, 3]`` in host memory."""
        check_array("image", image, np.float32, (None, None, None))
        height, width, channels = image.shape
        if channels < 3:
            raise ValueError(f"image has {channels} channels, not 3")
        out = self.device.empty((height, width, 3), np.uint8)
        count = height * width * 3
        self._each("pixels", out, (image, out), count, np.int32(channels))
        found: U8 = self.device.download(out)
        return found

    # ------------------------------------------------------------------ latents

    def mix(self, x: Any, base: Any, y: Any, scale: float) -> Any:
        """Write ``y + scale * (x - base)`` into ``y``, and return it."""
        for name, array in (("x", x), ("y", y), *((("base", base),) if base is not None else ())):
            check_array(name, array, np.float32, x.shape)
        args = (x, base, y, y, np.float32(scale))
        self._each("mix", y, args, int(np.prod(x.shape)))
        return y

    def all_finite(self, x: Any) -> bool:
        """True if no float32 value is infinite or NaN; waits for the GPU."""
        check_array("x", x, np.float32, x.shape)
        flag = self.device.zeros((1,), np.int32)
        self._each("find_infinite", x, (x, flag), int(np.prod(x.shape)))
        return not self.device.download(flag)[0]

    def _each(
        self,
        name: str,
        array: Any,
        args: tuple[Argument, ...],
        count: int,
        *numbers: Argument,
    ) -> None:
        """Launch one thread per element or word of the array; their count goes after ``args``."""
        if count > _INT_MAX:
            raise ValueError(f"an array of shape {array.shape} is more than a launch can count")
        if count:
            grid = (-(-count // _THREADS),)
            args = (*args, np.int32(count), *numbers)
            self.device.launch(_kernel(name), grid, (_THREADS,), args)


def refusal(widths: dict[str, int], head_dim: int, norms: int) -> str:
    """Return why the kernels do not support a picture model, or "".

    ``widths``: of rows, by name; ``head_dim``: of the transformer; ``norms``: channels of the
    widest group norm.
    """
    for name, width in widths.items():
        if width % elementwise.VECTOR or width > elementwise.MAX_WIDTH:
            return (
                f"on CUDA {name} must be a multiple of {elementwise.VECTOR} up to "
                f"{elementwise.MAX_WIDTH}, not {width}"
            )
    if head_dim > JOINT_HEADS[-1]:
        return f"the CUDA kernels support heads of up to {JOINT_HEADS[-1]}, not {head_dim}"
    if norms > 8 * _THREADS:
        return f"the CUDA kernels support group norms of up to {8 * _THREADS} channels, not {norms}"
    return ""


def _kernel(name: str) -> Kernel:
    return Kernel("pictures.cu", name)


def _words(array: Any) -> int:
    return int(np.prod(array.shape)) // elementwise.VECTOR


def _check_rows(x: Any, other: Any) -> int:
    """Return the width of two bfloat16 arrays of one shape ``[T, F]``."""
    check_array("x", x, BF16, (None, None))
    check_array("out", other, BF16, x.shape)
    check_multiple("the width of x", x.shape[1], elementwise.VECTOR)
    return int(x.shape[1])
