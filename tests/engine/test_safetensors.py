import json
import random
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading.gguf import GgufFile
from baton.engine.loading.safetensors import SafetensorsFile, TensorStore
from baton.proto.errors import CheckpointError
from baton.text.tokenizer import Tokenizer


def pack(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2, 3), begin=0, end=24):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(folder: Path, content: bytes, name="model.safetensors") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_reads_three_dtypes_and_the_metadata_is_no_tensor(tmp_path):
    f32 = np.arange(6, dtype=np.float32)
    f16, bf16 = np.float16([1.5, -2]), np.array([0x3F80, 0xC000], np.uint16)
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry(),
        "b": entry("F16", (2,), 24, 28),
        "c": entry("BF16", (2, 1), 28, 32),
        "empty": entry("F32", (0, 7), 32, 32),
    }
    file = SafetensorsFile(
        write(tmp_path, pack(header, f32.tobytes() + f16.tobytes() + bf16.tobytes()))
    )
    assert list(file.entries) == ["a", "b", "c", "empty"]
    np.testing.assert_array_equal(file.tensor("a"), f32.reshape(2, 3))
    np.testing.assert_array_equal(file.tensor("b"), f16)
    np.testing.assert_array_equal(file.tensor("c"), bf16.reshape(2, 1))
    assert file.tensor("c").dtype == np.uint16
    assert file.tensor("empty").shape == (0, 7)


def test_every_view_is_aligned(tmp_path):
    header = pack({"a": entry()}, np.arange(6, dtype=np.float32).tobytes())
    odd = json.dumps({"a": entry()}).encode() + b" " * (1 if len(header) % 4 == 0 else 0)
    for spaces in range(4):
        content = pack(odd + b" " * spaces, np.arange(6, dtype=np.float32).tobytes())
        tensor = SafetensorsFile(write(tmp_path, content, f"{spaces}.safetensors")).tensor("a")
        assert tensor.flags.aligned
        np.testing.assert_array_equal(tensor.ravel(), np.arange(6))


DATA = bytes(24)
BROKEN = {
    "empty": b"",
    "short": b"\x01\x02",
    "header past the end": pack({"a": entry()}, DATA, length=4096),
    "huge header": pack({}, b"", length=1 << 62),
    "not json": pack(b"{'a'", DATA),
    "not utf-8": pack(b'{"\xff\xfe":1}', DATA),
    "deep json": pack(b"[" * 100_000, DATA),
    "a list": pack([], DATA),
    "a name twice": pack(b'{"a": {"dtype":"F32"}, "a": 1}', DATA),
    "entry no object": pack({"a": 3}, DATA),
    "unknown dtype": pack({"a": entry("F17")}, DATA),
    "dtype no text": pack({"a": entry(["F32"])}, DATA),
    "negative size": pack({"a": entry(shape=(-2, -3))}, DATA),
    "float size": pack({"a": entry(shape=(2.0, 3))}, DATA),
    "bool size": pack({"a": entry(shape=(True, 6))}, DATA),
    "no offsets": pack({"a": {"dtype": "F32", "shape": [6]}}, DATA),
    "reversed offsets": pack({"a": entry(begin=24, end=0)}, DATA),
    "negative offset": pack({"a": entry(begin=-24, end=0)}, DATA),
    "size and span differ": pack({"a": entry(shape=(2, 4))}, DATA),
    "past the end": pack({"a": entry()}, DATA[:20]),
    "overlap": pack({"a": entry(), "b": entry("F32", (1,), 20, 24)}, DATA),
    "gap": pack({"a": entry("F32", (1,), 0, 4), "b": entry("F32", (1,), 8, 12)}, DATA[:12]),
    "rest": pack({"a": entry()}, DATA + b"\0"),
    "overflowing shape": pack({"a": entry(shape=(1 << 40, 1 << 40))}, DATA),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damage_is_one_clear_error(tmp_path, name):
    path = write(tmp_path, BROKEN[name])
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1841368\n"


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    """What a clone without Git LFS has in the place of each large file."""
    for opened in (SafetensorsFile, GgufFile):
        with pytest.raises(CheckpointError, match=r"pointer of Git LFS.* git lfs pull"):
            opened(write(tmp_path, POINTER))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a pointer of Git LFS"):
        Tokenizer.from_files({"tokenizer.json": POINTER}, origin="folder")


@pytest.mark.parametrize("name", ["past the end", "overlap", "gap", "unknown dtype"])
def test_the_tensor_is_named(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"tensor '[ab]'"):
        SafetensorsFile(write(tmp_path, BROKEN[name]))


def test_any_cut_and_any_flipped_header_byte_is_survived(tmp_path):
    header = {"a": entry(), "b": entry("BF16", (3,), 24, 30)}
    whole = pack(header, bytes(30))
    path = tmp_path / "model.safetensors"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)
    rng = random.Random(1)
    for _ in range(500):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole) - 30)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            file = SafetensorsFile(path)
            for name in file.entries:
                file.tensor(name).sum()
        except CheckpointError:
            pass


def test_unsupported_dtype_is_named_when_asked_for(tmp_path):
    file = SafetensorsFile(write(tmp_path, pack({"a": entry("I64", (3,))}, DATA)))
    with pytest.raises(CheckpointError, match="'a' is I64; supported are F32, F16, BF16"):
        file.tensor("a")


def shards(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write(folder, pack({"a": entry()}, DATA), "one.safetensors")
    write(folder, pack({"b": entry()}, b"\1" * 24), "two.safetensors")


def test_shards_are_one_store(tmp_path):
    shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    store = TensorStore.open(tmp_path)
    assert (sorted(store), len(store), store.nbytes) == (["a", "b"], 2, 48)
    assert store.tensor("b").view(np.uint8).max() == 1
    assert store.path("b").name == "two.safetensors"
    assert "c" not in store
    with pytest.raises(CheckpointError, match="'c' is missing"):
        store.tensor("c")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ({"a": "../one.safetensors"}, "names the file"),
        ({"a": 3}, "names the file"),
        ({"a": "three.safetensors"}, "cannot be read"),
        ({"a": "two.safetensors"}, "'a' is missing"),
    ],
)
def test_broken_index(tmp_path, weight_map, message):
    shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        TensorStore.open(tmp_path)


def test_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no weights"):
        TensorStore.open(tmp_path)
