"""Reads safetensors files as untrusted input.

A file is an 8-byte little-endian header length, a JSON header and the tensors' bytes. The
whole header is checked against the file's size before any tensor is read, so no view uses an
unchecked offset. Views share the file's memory map: nothing is read before it is used.
NumPy has no bfloat16 dtype, so such tensors are returned as uint16 bits.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError
from baton.runtime.small_files import check_file
from baton.text.lfs_pointers import IS_LFS_POINTER, LFS_POINTER

from ..kernels.fp8 import DTYPE as FP8
from ..kernels.fp8 import dequantized
from .fp8 import INPUT_SCALE, SCALE_SUFFIXES, Fp8, check_codes, row_scales
from .json_files import read_json

Weights = npt.NDArray[np.generic]

MAX_HEADER_BYTES = 100_000_000
"""Longest header accepted, as in the format's reference implementation."""
SINGLE_NAME = "model.safetensors"

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_READABLE: dict[str, npt.DTypeLike] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def is_narrow(dtype: str) -> bool:
    """True if tensors of this type are computed as bfloat16: such ones, and quantized ones."""
    return dtype not in ("F32", "F16")


class TensorEntry(msgspec.Struct, frozen=True):
    """Position of a tensor: ``begin`` and ``end`` are relative to the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One file with a checked header; :meth:`tensor` returns views of the memory map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        length = _header_length(path, self._map)
        self._data = 8 + length
        self.entries = _entries(path, self._map[8 : self._data], len(self._map) - self._data)

    def tensor(self, name: str) -> Weights:
        """Return a view of a tensor: float32, float16, or uint16 bits of bfloat16.

        Raises :class:`CheckpointError` for an unknown name or another dtype.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor '{name}' is missing")
        if entry.dtype not in _READABLE:
            supported = ", ".join(_READABLE)
            raise CheckpointError(
                f"{self.path}: tensor '{name}' is {entry.dtype}; supported are {supported}"
            )
        count = math.prod(entry.shape)
        flat: Weights = np.frombuffer(
            self._map, _READABLE[entry.dtype], count, self._data + entry.begin
        )
        shaped = flat.reshape(entry.shape)
        return shaped if shaped.flags.aligned else shaped.copy()

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a tensor of any dtype."""
        entry = self.entries[name]
        return memoryview(self._map)[self._data + entry.begin : self._data + entry.end]

    def release_pages(self) -> None:
        """Take the file's pages out of this process's memory; a view maps them again."""
        self._map.madvise(mmap.MADV_DONTNEED)


class TensorFile(Protocol):
    """A file of tensors: of safetensors, or of another format under the same names."""

    path: Path
    entries: dict[str, TensorEntry]

    def tensor(self, name: str) -> Weights:
        """Return a tensor's values; CheckpointError for an unknown name."""
        ...

    def raw(self, name: str) -> memoryview:
        """Return a tensor's bytes."""
        ...

    def release_pages(self) -> None:
        """Take the file's pages out of this process's memory."""
        ...


class TensorStore:
    """The tensors of a model by name, in one file or in several.

    Mapping-like: ``name in store``, iteration over names, :meth:`tensor`, :meth:`entry`.
    ``fp8``: how the scales of 8-bit floats lie; None: such tensors are refused.
    """

    def __init__(self, files: Mapping[str, TensorFile], fp8: Fp8 | None = None) -> None:
        self._files = files
        self._fp8 = fp8

    @classmethod
    def open(cls, folder: Path, stem: str = "model", fp8: Fp8 | None = None) -> TensorStore:
        """Open ``STEM.safetensors`` or all shards of ``STEM.safetensors.index.json``."""
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            return cls(_open_shards(folder, index), fp8)
        if not single.is_file():
            raise CheckpointError(
                f"{folder}: no weights; expected {single.name} or {index.name} in this folder"
            )
        file = SafetensorsFile(single)
        return cls(dict.fromkeys(file.entries, file), fp8)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape and position of a tensor; of a quantized tensor, its type's name."""
        return self._file(name).entries[name]

    def tensor(self, name: str) -> Weights:
        """Return a tensor; see :meth:`SafetensorsFile.tensor`. Quantized ones become float32."""
        if self._fp8 is not None and self.entry(name).dtype == FP8:
            return dequantized(*self.codes(name))
        return self._file(name).tensor(name)

    def codes(self, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], int]:
        """Return a matrix of 8-bit floats: codes, their scales ``[rows, groups]``, group's columns.

        Raises CheckpointError if its scales are missing or do not fit.
        """
        shape, block = self.entry(name).shape, self._fp8.block if self._fp8 else None
        if len(shape) != 2:
            raise CheckpointError(f"{self.path(name)}: tensor '{name}' is {FP8}, but no matrix")
        scale = next((s for s in self.partners(name) if not s.endswith(INPUT_SCALE)), None)
        if scale is None:
            raise CheckpointError(f"{self.path(name)}: tensor '{name}' has no scales")
        codes = np.frombuffer(self.raw(name), np.uint8).reshape(shape)
        check_codes(name, codes)
        return codes, *row_scales(name, widened(self.tensor(scale)), shape, block)

    def partners(self, name: str) -> list[str]:
        """Return the names of the scales of a tensor of 8-bit floats; none for others."""
        if self._fp8 is None or self.entry(name).dtype != FP8:
            return []
        names = [name + suffix for suffix in SCALE_SUFFIXES]
        names.append(name.removesuffix("weight") + INPUT_SCALE)
        return [each for each in names if each in self._files]

    def take(self, name: str, shape: tuple[int, ...]) -> Weights:
        """Return a tensor as float32 or as uint16 bfloat16 bits; float16 is widened to float32.

        Raises CheckpointError if the tensor is missing or has another shape.
        """
        self.check(name, shape)
        tensor = self.tensor(name)
        return tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError if the tensor is missing or has another shape."""
        found = self.entry(name).shape
        if found != shape:
            raise CheckpointError(
                f"{self.path(name)}: tensor '{name}' has shape {list(found)}, "
                f"config.json requires {list(shape)}"
            )

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a tensor of any dtype."""
        return self._file(name).raw(name)

    def release_pages(self) -> None:
        """Take the files' pages out of this process's memory, after the weights were packed.

        What packed models still read there, such as a table of embeddings, is mapped again.
        """
        for file in {id(file): file for file in self._files.values()}.values():
            file.release_pages()

    def path(self, name: str) -> Path:
        """Return the path of the file that contains a tensor."""
        return self._file(name).path

    @property
    def nbytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(f.entries[n].end - f.entries[n].begin for n, f in self._files.items())

    @property
    def elements(self) -> int:
        """Number of all tensors' elements."""
        return sum(math.prod(f.entries[n].shape) for n, f in self._files.items())

    @property
    def loaded_bytes(self) -> int:
        """Total bytes of all tensors in the types in which a CPU computes them.

        Quantized tensors stay quantized, in panels that are at most a tenth larger.
        """
        return sum(_loaded_bytes(f.entries[n]) for n, f in self._files.items())

    def _file(self, name: str) -> TensorFile:
        file = self._files.get(name)
        if file is None:
            where = next((f.path.parent for f in self._files.values()), Path())
            raise CheckpointError(f"{where}: tensor '{name}' is missing")
        return file


def _loaded_bytes(entry: TensorEntry) -> int:
    if entry.dtype not in _ITEM_BYTES:
        return (entry.end - entry.begin) * 11 // 10
    return math.prod(entry.shape) * (2 if is_narrow(entry.dtype) else 4)


def widened(tensor: Weights) -> npt.NDArray[np.float32]:
    """Return a float32 copy; uint16 arrays hold bfloat16 bits."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def map_file(path: Path) -> mmap.mmap:
    """Map a file for reading. Raises CheckpointError if that is impossible."""
    try:
        check_file(path)
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: the file is empty") from error
    if content[: len(LFS_POINTER)] == LFS_POINTER:
        raise CheckpointError(f"{path} {IS_LFS_POINTER}")
    return content


def _header_length(path: Path, data: mmap.mmap) -> int:
    if len(data) < 8:
        raise CheckpointError(f"{path}: truncated: {len(data)} bytes, a header needs 8")
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise CheckpointError(
            f"{path}: truncated or corrupt: header of {length} bytes in a file of {len(data)}"
        )
    return length


def _entries(path: Path, header: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    try:
        table = json.loads(header, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt header: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: corrupt header: not a JSON object")
    table.pop("__metadata__", None)
    entries = {name: _entry(path, name, value) for name, value in table.items()}
    _check_cover(path, entries, data_bytes)
    return entries


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _entry(path: Path, name: str, value: object) -> TensorEntry:
    """Check one header entry by itself."""
    where = f"{path}: tensor '{name}'"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: corrupt header entry")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")
    if not _naturals(shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not a range")
    wanted, found = math.prod(shape) * _ITEM_BYTES[dtype], offsets[1] - offsets[0]
    if wanted != found:
        raise CheckpointError(
            f"{where}: {dtype} {shape} needs {wanted} bytes, its offsets span {found}"
        )
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_cover(path: Path, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    """Tensors must cover the data exactly: no overlap, no gap, nothing past the end."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > data_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor '{name}' ends at byte {entry.end} of {data_bytes}"
            )
        if entry.begin != at:
            kind = "overlaps the one before" if entry.begin < at else "leaves a gap before it"
            raise CheckpointError(f"{path}: corrupt header: tensor '{name}' {kind}")
        at = entry.end
    if at != data_bytes:
        raise CheckpointError(f"{path}: {data_bytes - at} bytes after the last tensor")


def _open_shards(folder: Path, index: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    shards: dict[str, SafetensorsFile] = {}
    files: dict[str, SafetensorsFile] = {}
    for tensor, shard in weight_map.items():
        # A plain name only: an index must not reach outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: tensor '{tensor}' names the file {shard!r}")
        if shard not in shards:
            shards[shard] = SafetensorsFile(folder / shard)
        if tensor not in shards[shard].entries:
            raise CheckpointError(f"{folder / shard}: tensor '{tensor}' is missing")
        files[tensor] = shards[shard]
    return files
