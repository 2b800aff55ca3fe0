"""Reads GGUF files as untrusted input: header, metadata, table of tensors.

A file is a header of keys with typed values, a table of tensors, and their aligned data. Every
count, length and offset is checked against the file's size before memory is allocated for it, so
no view uses an unchecked offset. Views share the file's memory map.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.errors import CheckpointError

from .gguf_blocks import BLOCKS
from .safetensors import TensorEntry, map_file

Numbers = npt.NDArray[np.generic]


class Texts(NamedTuple):
    """An array of texts, each with its length before it, not decoded: vocabularies are large."""

    data: memoryview
    number: int


Value = int | float | bool | str | Texts | Numbers

SUFFIX = ".gguf"
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_TEXT_BYTES = 16 << 20
"""Longest text of the metadata; a chat template has some kilobytes."""
MAX_ITEMS = 1 << 24
"""Longest array of the metadata; the largest vocabularies have 2**18 tokens."""
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
MAX_PARTS = 1 << 10
"""Largest number of files into which one model is split."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class TensorType(msgspec.Struct, frozen=True):
    """An element type: each block of ``items`` elements of a row takes ``nbytes`` bytes."""

    name: str
    items: int
    nbytes: int


TENSOR_TYPES = {
    number: TensorType(*facts)
    for number, facts in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
        10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
        26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    }.items()
}  # fmt: skip
"""All element types by their numbers in the file."""
READABLE_TYPES = ("F32", "F16", "BF16", *BLOCKS)


class Metadata:
    """The keys of a file's header; the getters raise CheckpointError for a value of another type.

    Arrays of numbers are NumPy arrays. Texts in arrays are decoded when they are asked for.
    """

    def __init__(self, path: Path, values: dict[str, Value]) -> None:
        self.path = path
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._get(key, default)
        return value if isinstance(value, str) else self._refuse(key, "a text")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            return self._refuse(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return an integer or a finite float."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._refuse(key, "a number")
        return value if math.isfinite(value) else self._refuse(key, "a finite number")

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a truth value."""
        value = self._get(key, default)
        return value if isinstance(value, bool) else self._refuse(key, "true or false")

    def texts(self, key: str) -> list[str]:
        """Return an array of texts."""
        value = self._get(key, None)
        if not isinstance(value, Texts):
            return self._refuse(key, "an array of texts")
        found, at, length_at = [], 0, struct.Struct("<Q").unpack_from
        for _ in range(value.number):
            begin = at + 8
            at = begin + length_at(value.data, at)[0]
            try:
                found.append(str(value.data[begin:at], "utf-8"))
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self.path}: '{key}' is not UTF-8: {error}") from None
        return found

    def numbers(self, key: str) -> Numbers:
        """Return an array of numbers."""
        value = self._get(key, None)
        if not isinstance(value, np.ndarray):
            return self._refuse(key, "an array of numbers")
        return value

    def _get(self, key: str, default: Value | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: the key '{key}' is missing")
        return value

    def _refuse(self, key: str, kind: str) -> typing.NoReturn:
        raise CheckpointError(f"{self.path}: the key '{key}' is not {kind}")


class GgufFile:
    """One file with a checked header. Shapes are in NumPy's order: rows, then columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        cursor = _Cursor(path, memoryview(self._map))
        tensors = cursor.start()
        self.metadata = cursor.metadata()
        self.entries, self._data = cursor.table(tensors, self.metadata)

    @property
    def header(self) -> memoryview:
        """The bytes before the tensors' data."""
        return memoryview(self._map)[: self._data]

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a tensor. Raises KeyError for an unknown name."""
        entry = self.entries[name]
        return memoryview(self._map)[self._data + entry.begin : self._data + entry.end]

    def release_pages(self) -> None:
        """Take the file's pages out of this process's memory; a view maps them again."""
        self._map.madvise(mmap.MADV_DONTNEED)


def open_parts(path: Path) -> list[GgufFile]:
    """Open a file, or all files of a split model of which ``path`` is one; the first part first.

    Raises CheckpointError for a missing part, and for a tensor that two parts have.
    """
    parts = [GgufFile(part) for part in part_paths(path)]
    count = parts[0].metadata.integer("split.count", 1)
    if count not in (0, len(parts)):
        raise CheckpointError(f"{path}: split.count is {count}, the name states {len(parts)} parts")
    seen: set[str] = set()
    for index, part in enumerate(parts):
        if part.metadata.integer("split.no", index) != index:
            raise CheckpointError(f"{part.path}: split.no does not fit the file's name")
        twice = seen.intersection(part.entries)
        if twice:
            raise CheckpointError(f"{part.path}: tensor '{min(twice)}' is in two parts")
        seen.update(part.entries)
    total = parts[0].metadata.integer("split.tensors.count", len(seen))
    if total != len(seen):
        raise CheckpointError(f"{path}: split.tensors.count is {total}, the parts have {len(seen)}")
    return parts


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts by a part's name, ``NAME-00001-of-00003.gguf``."""
    split = _PART.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split[3])
    if not 1 <= int(split[2]) <= count <= MAX_PARTS:
        raise CheckpointError(f"{path}: the name is not part of at most {MAX_PARTS}")
    return [path.with_name(f"{split[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def gguf_file(folder: Path) -> Path | None:
    """Return the only GGUF file of a folder, or the first part of its only model; else None."""
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if not found or any(path not in part_paths(found[0]) for path in found):
        return None
    return part_paths(found[0])[0]


def model_stem(path: Path) -> str:
    """Return the file's name without its ending and the number of the part."""
    split = _PART.fullmatch(path.name)
    return split[1] if split else path.name.removesuffix(SUFFIX)


class _Cursor:
    """Reads a header from its begin; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._keys = 0

    def start(self) -> int:
        """Read magic, version and counts; return the number of tensors."""
        if bytes(self._take(4, "magic number")) != _MAGIC:
            raise CheckpointError(f"{self._path}: not a GGUF file: it does not begin with 'GGUF'")
        version = self._integer("<u4", "version")
        if version not in _VERSIONS:
            order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(
                f"{self._path}: unsupported GGUF file: {order}; supported are little-endian files "
                f"of versions {' and '.join(map(str, _VERSIONS))}"
            )
        tensors = self._count("number of tensors", MAX_TENSORS)
        self._keys = self._count("number of keys", MAX_KEYS)
        return tensors

    def metadata(self) -> Metadata:
        """Read all keys and values."""
        values: dict[str, Value] = {}
        for _ in range(self._keys):
            key = self._text("key", MAX_NAME_BYTES)
            if key in values:
                raise CheckpointError(f"{self._path}: corrupt header: two keys '{key}'")
            values[key] = self._value(key)
        return Metadata(self._path, values)

    def table(self, count: int, metadata: Metadata) -> tuple[dict[str, TensorEntry], int]:
        """Read the table of tensors; return it and the begin of the data in the file."""
        alignment = metadata.integer("general.alignment", _ALIGNMENT)
        if alignment & (alignment - 1) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise CheckpointError(
                f"{self._path}: general.alignment {alignment} is not a power of two up to "
                f"{MAX_ALIGNMENT}"
            )
        entries: dict[str, TensorEntry] = {}
        for _ in range(count):
            name = self._text("tensor's name", MAX_NAME_BYTES)
            if name in entries:
                raise CheckpointError(f"{self._path}: corrupt header: two tensors '{name}'")
            entries[name] = self._entry(name, alignment)
        begin = -(-self._at // alignment) * alignment
        self._check_places(entries, len(self._data) - begin)
        return entries, begin

    def _entry(self, name: str, alignment: int) -> TensorEntry:
        where = f"{self._path}: tensor '{name}'"
        dimensions = self._integer("<u4", "number of dimensions")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(
                f"{where}: {dimensions} dimensions; supported are 1 to {MAX_DIMENSIONS}"
            )
        sizes = [self._integer("<u8", "dimension") for _ in range(dimensions)]
        number = self._integer("<u4", "tensor type")
        offset = self._integer("<u8", "offset")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            raise CheckpointError(f"{where}: unknown tensor type {number}")
        if min(sizes) < 1 or sizes[0] % kind.items:
            raise CheckpointError(
                f"{where}: rows of {sizes[0]} elements (dimensions {sizes}) are not whole blocks "
                f"of {kind.items} of {kind.name}"
            )
        if offset % alignment:
            raise CheckpointError(f"{where}: offset {offset} is not a multiple of {alignment}")
        nbytes = math.prod(sizes) // kind.items * kind.nbytes
        return TensorEntry(kind.name, tuple(reversed(sizes)), offset, offset + nbytes)

    def _check_places(self, entries: dict[str, TensorEntry], data_bytes: int) -> None:
        """Raise CheckpointError for a tensor past the end of the file, or over another."""
        at = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.end > data_bytes:
                raise CheckpointError(
                    f"{self._path}: truncated: tensor '{name}' ends at byte {entry.end} of "
                    f"{max(data_bytes, 0)}"
                )
            if entry.begin < at:
                raise CheckpointError(
                    f"{self._path}: corrupt header: tensor '{name}' overlaps the one before"
                )
            at = entry.end

    # ------------------------------------------------------------------ values

    def _value(self, key: str) -> Value:
        kind = self._integer("<u4", f"type of '{key}'")
        if kind == _STRING:
            return self._text(f"value of '{key}'", MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(kind, 1, key)[0].item()  # type: ignore[no-any-return]

    def _array(self, key: str) -> Value:
        kind = self._integer("<u4", f"type of '{key}'")
        count = self._count(f"length of '{key}'", MAX_ITEMS)
        if kind != _STRING:
            return self._numbers(kind, count, key).copy()
        if 8 * count > len(self._data) - self._at:
            raise self._truncated(f"value of '{key}'")
        return self._texts(f"value of '{key}'", count)

    def _texts(self, what: str, count: int) -> Texts:
        """Skip many texts, because vocabularies are large."""
        data, begin, end = self._data, self._at, len(self._data)
        at, length_at = begin, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at = at + 8 + length_at(data, at)[0] if at + 8 <= end else end + 1
            if at > end:
                raise self._truncated(what)
        self._at = at
        return Texts(data[begin:at], count)

    def _numbers(self, kind: int, count: int, key: str) -> Numbers:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: the key '{key}' has the unsupported type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        found: Numbers = np.frombuffer(
            self._take(count * dtype.itemsize, f"value of '{key}'"), dtype, count
        )
        return found

    def _text(self, what: str, limit: int) -> str:
        (length,) = struct.unpack("<Q", self._take(8, what))
        if length > limit:
            raise CheckpointError(
                f"{self._path}: corrupt header: {what} of {length} bytes, the limit is {limit}"
            )
        try:
            return str(self._take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} is not UTF-8: {error}") from None

    def _count(self, what: str, limit: int) -> int:
        count = self._integer("<u8", what)
        if count > limit:
            raise CheckpointError(
                f"{self._path}: corrupt header: {what} {count}, the limit is {limit}"
            )
        return count

    def _integer(self, dtype: str, what: str) -> int:
        size = int(dtype[-1])
        return int.from_bytes(self._take(size, what), "little")

    def _take(self, length: int, what: str) -> memoryview:
        end = self._at + length
        if end > len(self._data):
            raise self._truncated(what)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _truncated(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: truncated: the {what} at byte {self._at} passes the end of the file "
            f"at {len(self._data)}"
        )
