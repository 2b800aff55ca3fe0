import random
import struct
import types
from pathlib import Path

import numpy as np
import pytest

from baton.engine.loading import gguf_blocks
from baton.engine.loading.gguf import MAX_ITEMS, MAX_KEYS, GgufFile, open_parts
from baton.engine.loading.gguf_blocks import dequantize
from baton.engine.loading.gguf_tensors import GgufTensors
from baton.proto.errors import CheckpointError

from .gguf_cases import (
    SIZES,
    TYPES,
    floats,
    gguf,
    packed,
    random_blocks,
    random_tensor,
    text,
    values_of,
    write,
)

METADATA = {
    "general.architecture": "llama",
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "general.names": ["a", "bc"],
    "general.scores": [0.5, -1.0],
    "general.exact": True,
    "general.share": 0.25,
    "general.shift": -3,
}


def tensors(rng: np.random.Generator) -> dict:
    made = {f"blk.{i}.ffn_up.weight": random_tensor(k, (3, 256), rng) for i, k in enumerate(TYPES)}
    return made | {"output_norm.weight": floats(rng.normal(size=7))}


# ---------------------------------------------------------------------------- values


def test_every_type_has_the_values_of_the_scalar_definition(tmp_path):
    made = tensors(np.random.default_rng(1))
    file = GgufFile(write(tmp_path, gguf(METADATA, made)))
    opened = GgufTensors(file, file.metadata)
    for index, kind in enumerate(TYPES):
        name, source = f"model.layers.{index}.mlp.up_proj.weight", f"blk.{index}.ffn_up.weight"
        assert opened.entries[name].dtype == kind
        assert opened.entries[name].shape == (3, 256)
        assert bytes(opened.raw(name)) == made[source][2]
        np.testing.assert_array_equal(opened.tensor(name), values_of(made[source]), kind)
    np.testing.assert_array_equal(
        opened.tensor("model.norm.weight"), values_of(made["output_norm.weight"])
    )


def test_a_large_tensor_is_converted_in_parts(monkeypatch):
    monkeypatch.setattr(gguf_blocks, "_ELEMENTS_AT_ONCE", 512)
    rng = np.random.default_rng(2)
    for kind in TYPES:
        blocks = random_blocks(kind, 37, rng)
        out = np.empty(37 * SIZES[kind][0], np.float32)
        dequantize(kind, memoryview(blocks.tobytes()), out)
        np.testing.assert_array_equal(out, values_of((kind, out.shape, blocks.tobytes())))


PLANTED = {
    "swapped halves of bytes": ("[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]"),
    "a scale off by one block": (
        "view(np.float16).astype(np.float32)",
        "view(np.float16).astype(np.float32)[np.arange(-1, len(blocks) - 1)]",
    ),
    "the minimum's sign": ("values - m[:, :, None]", "values + m[:, :, None]"),
    "scales in the wrong order": (
        "[first & 63, third & 15 | first >> 6 << 4]",
        "[third & 15 | first >> 6 << 4, first & 63]",
    ),
    "minima for scales": ("return _joined(scales), _joined(minima)",
                          "return _joined(minima), _joined(scales)"),
    "the high bits of Q6_K": ("shifts[:, None] & 3\n    values", "shifts[:, None] & 1\n    values"),
    "the high bits of Q6_K shifted": ("(low | high << 4).astype(np.float32) - 32\n    scales = ",
                                      "(low | high << 3).astype(np.float32) - 32\n    scales = "),
    "the inverted bit of Q3_K": ("(third ^ 1) << 2", "third << 2"),
    "the fifth bit": ('bitorder="little"', 'bitorder="big"'),
    "the order of IQ4_NL": ("-104, -83", "-83, -104"),
    "the fifth bit of Q5_K": ("blocks[:, None, 16:48] >>", "blocks[:, None, 16:48] << 1 >>"),
}  # fmt: skip


def differs(module) -> list[str]:
    """The types whose values by a module differ from the scalar definition."""
    rng = np.random.default_rng(3)
    found = []
    for kind in TYPES:
        content = random_blocks(kind, 3, rng).tobytes()
        out = np.empty(3 * SIZES[kind][0], np.float32)
        module.dequantize(kind, memoryview(content), out)
        if not np.array_equal(out, values_of((kind, out.shape, content))):
            found.append(kind)
    return found


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_of_the_conversion_is_seen(bug):
    assert differs(gguf_blocks) == []
    source = Path(gguf_blocks.__file__).read_text()
    old, new = PLANTED[bug]
    assert source.count(old) == 1
    module = types.ModuleType("planted")
    exec(compile(source.replace(old, new), "planted", "exec"), module.__dict__)
    assert differs(module)


# ---------------------------------------------------------------------------- header


def test_reads_values_of_all_kinds(tmp_path):
    metadata = GgufFile(write(tmp_path, gguf(METADATA, {}))).metadata
    assert metadata.text("general.architecture") == "llama"
    assert metadata.integer("general.shift") == -3
    assert metadata.flag("general.exact") is True
    assert metadata.number("general.share") == 0.25
    assert metadata.texts("general.names") == ["a", "bc"]
    assert metadata.numbers("general.scores").tolist() == [0.5, -1]
    assert metadata.integer("none", 5) == 5
    for getter in ("text", "integer", "number", "flag", "texts", "numbers"):
        with pytest.raises(CheckpointError, match="'none' is missing"):
            getattr(metadata, getter)("none")
    for getter, key in (
        ("text", "shift"), ("integer", "exact"), ("number", "exact"), ("flag", "shift"),
        ("texts", "scores"), ("numbers", "names"), ("integer", "share"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=f"'general.{key}' is not"):
            getattr(metadata, getter)(f"general.{key}")


def test_other_alignments_and_old_versions(tmp_path):
    made = tensors(np.random.default_rng(4))
    for alignment in (1, 8, 64):
        content = gguf({**METADATA, "general.alignment": alignment}, made, alignment)
        for version in (2, 3):
            old = content[:4] + struct.pack("<I", version) + content[8:]
            file = GgufFile(write(tmp_path, old))
            for name, (_, _, data) in made.items():
                assert bytes(file.raw(name)) == data


def test_parts_of_a_split_model(tmp_path):
    made = tensors(np.random.default_rng(5))
    names = list(made)
    split = {"split.count": 2, "split.tensors.count": len(made)}
    first = {"split.no": 0, **split, **METADATA}
    one = {name: made[name] for name in names[:4]}
    two = {name: made[name] for name in names[4:]}
    path = write(tmp_path, gguf(first, one), "m-00001-of-00002.gguf")
    other = write(tmp_path, gguf({"split.no": 1, **split}, two), "m-00002-of-00002.gguf")
    for start in (path, other):
        parts = open_parts(start)
        assert [part.path for part in parts] == [path, other]
        assert parts[0].metadata.text("general.architecture") == "llama"
        assert [*parts[0].entries, *parts[1].entries] == names
    write(tmp_path, gguf({"split.no": 1, **split}, one), other.name)
    with pytest.raises(CheckpointError, match="is in two parts"):
        open_parts(path)
    write(tmp_path, gguf({"split.no": 0, **split}, two), other.name)
    with pytest.raises(CheckpointError, match=r"split\.no does not fit"):
        open_parts(path)
    write(tmp_path, gguf({"split.no": 1}, {}), other.name)
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is 11, the parts have 4"):
        open_parts(path)
    other.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_parts(path)


def broken() -> dict[str, tuple[bytes, str]]:
    """Contents and the error of each."""
    good = gguf({"general.architecture": "llama"}, {"t": floats(np.zeros(8))})
    head = b"GGUF" + struct.pack("<I", 3)

    def one(dimensions=(8,), kind=0, offset=0, count=1, name="t") -> bytes:
        table = text(name) + struct.pack("<I", len(dimensions))
        table += struct.pack(f"<{len(dimensions)}Q", *dimensions) + struct.pack("<IQ", kind, offset)
        return head + struct.pack("<QQ", count, 0) + table * count + bytes(160)

    def key(value: bytes, name: str | bytes = "k", count=1) -> bytes:
        return head + struct.pack("<QQ", 0, count) + (text(name) + value) * count

    return {
        "empty": (b"", "the file is empty"),
        "three bytes": (b"GGU", "truncated"),
        "another format": (b"PK\3\4" + bytes(100), "does not begin with 'GGUF'"),
        "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        "too many keys": (head + struct.pack("<QQ", 0, MAX_KEYS + 1), "number of keys"),
        "endless tensors": (head + struct.pack("<QQ", 2**63, 0), "number of tensors"),
        "a long key": (head + struct.pack("<QQQ", 0, 1, 2**40), "key of 1099511627776 bytes"),
        "a key past the end": (head + struct.pack("<QQQ", 0, 1, 99) + b"k", "truncated"),
        "not text": (key(packed(1), b"\xff"), "not UTF-8"),
        "two keys": (key(packed(1), count=2), "two keys 'k'"),
        "an unknown type": (key(struct.pack("<II", 13, 0)), "unsupported type 13"),
        "an array of arrays": (key(struct.pack("<IIQ", 9, 9, 1)), "unsupported type 9"),
        "an endless array": (key(struct.pack("<IIQ", 9, 4, MAX_ITEMS + 1)), "length of 'k'"),
        "an array past the end": (key(struct.pack("<IIQ", 9, 4, MAX_ITEMS)), "truncated"),
        "texts past the end": (key(struct.pack("<IIQ", 9, 8, MAX_ITEMS)), "truncated"),
        "a long text": (key(struct.pack("<IQ", 8, 2**60)), "the limit is"),
        "alignment 0": (gguf({"general.alignment": 0}, {}), "not a power of two"),
        "alignment 24": (gguf({"general.alignment": 24}, {}), "not a power of two"),
        "no dimensions": (one(()), "0 dimensions"),
        "five dimensions": (one((1,) * 5), "5 dimensions"),
        "a dimension of 0": (one((0,)), "not whole blocks"),
        "half a block": (one((48,), 8), "48 elements .* are not whole blocks of 32 of Q8_0"),
        "a product that overflows": (one((2**32, 2**32)), "truncated: tensor 't' ends at"),
        "unknown tensor type": (one(kind=77), "unknown tensor type 77"),
        "an odd offset": (one(offset=4), "offset 4 is not a multiple of 32"),
        "past the end": (one(offset=2**62), "truncated: tensor 't' ends at"),
        "two tensors": (one(count=2), "two tensors 't'"),
        "no data": (good[:-1], "truncated: tensor 't' ends at byte 32 of 31"),
    }


@pytest.mark.parametrize("case", broken())
def test_broken_files_are_refused(case, tmp_path):
    content, message = broken()[case]
    with pytest.raises(CheckpointError, match=message):
        GgufFile(write(tmp_path, content))


def test_overlapping_tensors_are_refused(tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
    for name in "ab":
        head += text(name) + struct.pack("<IQIQ", 1, 9, 0, 0 if name == "a" else 32)
    with pytest.raises(CheckpointError, match="'b' overlaps the one before"):
        GgufFile(write(tmp_path, head + bytes(256)))


def test_types_that_are_not_computed_are_refused_by_name(tmp_path):
    content = gguf(METADATA, {"output.weight": ("IQ2_XXS", (1, 256), bytes(66))})
    file = GgufFile(write(tmp_path, content))
    with pytest.raises(CheckpointError, match=r"'output\.weight' is IQ2_XXS; supported are F32"):
        GgufTensors(file, file.metadata)


def mutated(content: bytes, header: int, draw: random.Random) -> bytes:
    changed = bytearray(content)
    match draw.randrange(4):
        case 0:
            del changed[draw.randrange(len(changed)) :]
        case 1:
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(header)] = draw.randrange(256)
        case 2:
            at = draw.randrange(8, header - 8)
            changed[at : at + 8] = struct.pack("<Q", draw.choice([0, 1, 2**31, 2**63, 2**64 - 1]))
        case 3:
            at = draw.randrange(header)
            changed[at : at + draw.randint(1, 9)] = b""
    return bytes(changed)


def test_mutated_files_are_read_or_refused(tmp_path):
    """Whatever the bytes: the values of every tensor, or one typed error."""
    made = tensors(np.random.default_rng(6))
    content = gguf(METADATA, made)
    header = len(content) - sum(len(data) + 31 for _, _, data in made.values())
    draw, outcomes = random.Random(7), {True: 0, False: 0}
    for index in range(600):
        path = write(tmp_path, mutated(content, header, draw), f"{index % 2}.gguf")
        try:
            file = GgufFile(path)
            file.metadata.texts("general.names")  # decoded only now
            opened = GgufTensors(file, file.metadata)
            values = [opened.tensor(name) for name in opened.entries]
            raws = [opened.raw(name) for name in opened.entries]
        except CheckpointError as error:
            assert str(error).startswith(str(path))
            outcomes[False] += 1
            continue
        assert len(values) == len(raws)
        for value, entry in zip(values, opened.entries.values(), strict=True):
            assert value.shape == entry.shape
        outcomes[True] += 1
    assert min(outcomes.values()) > 20


# ---------------------------------------------------------------------------- names and order


def test_rows_of_queries_and_keys_are_in_the_usual_order(tmp_path):
    rng = np.random.default_rng(8)
    usual = {"q": rng.normal(size=(16, 32)), "k": rng.normal(size=(8, 32))}
    heads = {"q": 4, "k": 2}

    def in_pairs(array, count):  # as llama.cpp's converter writes them
        halves = array.reshape(count, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)

    made = {
        f"blk.0.attn_{part}.weight": floats(in_pairs(array, heads[part]))
        for part, array in usual.items()
    }
    made["blk.0.attn_q.bias"] = floats(in_pairs(usual["q"][:, 0], 4))
    quantized = random_tensor("Q4_0", (16, 32), rng)
    made["blk.1.attn_q.weight"] = quantized
    file = GgufFile(write(tmp_path, gguf(METADATA, made)))
    opened = GgufTensors(file, file.metadata)
    attention = "model.layers.0.self_attn"
    for part, array in usual.items():
        name = f"{attention}.{part}_proj.weight"
        np.testing.assert_array_equal(opened.tensor(name), array.astype(np.float32))
        assert bytes(opened.raw(name)) == array.astype(np.float32).tobytes()
    np.testing.assert_array_equal(
        opened.tensor(f"{attention}.q_proj.bias"), usual["q"][:, 0].astype(np.float32)
    )
    name = "model.layers.1.self_attn.q_proj.weight"
    raw = bytes(opened.raw(name))
    np.testing.assert_array_equal(opened.tensor(name), values_of(("Q4_0", (16, 32), raw)))
    np.testing.assert_array_equal(in_pairs(opened.tensor(name), 4), values_of(quantized))


def test_other_architectures_keep_their_rows_and_gemma_stores_norms_plus_one(tmp_path):
    rng = np.random.default_rng(9)
    rows, norm = rng.normal(size=(16, 32)), rng.uniform(0.5, 2, 32)
    made = {"blk.0.attn_q.weight": floats(rows), "blk.0.ffn_norm.weight": floats(norm)}
    for family, name, added in (
        ("qwen2", "post_attention_layernorm", 0), ("gemma3", "pre_feedforward_layernorm", 1),
    ):  # fmt: skip
        file = GgufFile(write(tmp_path, gguf({"general.architecture": family}, made)))
        opened = GgufTensors(file, file.metadata)
        same = opened.tensor("model.layers.0.self_attn.q_proj.weight")
        np.testing.assert_array_equal(same, rows.astype(np.float32))
        found = opened.tensor(f"model.layers.0.{name}.weight")
        np.testing.assert_array_equal(found, norm.astype(np.float32) - np.float32(added))
        raw = np.frombuffer(opened.raw(f"model.layers.0.{name}.weight"), np.float32)
        np.testing.assert_array_equal(raw, found)


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path):
    made = {"blk.0.attn_q.weight": floats(np.zeros((6, 4)))}
    file = GgufFile(write(tmp_path, gguf(METADATA, made)))
    opened = GgufTensors(file, file.metadata)
    with pytest.raises(CheckpointError, match="6 rows, which are not 4 heads"):
        opened.tensor("model.layers.0.self_attn.q_proj.weight")
