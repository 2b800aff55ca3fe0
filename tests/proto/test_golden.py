"""Bytes on the wire, committed: a change that older processes cannot read shows up here.

``golden/envelopes.json`` holds per message its frames in hex, once with every field set and
once with the required ones only. After a deliberate change:
``python -m pytest tests/proto/test_golden.py --write-golden``.
"""

import json
import struct
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from baton.kv_transfer.checksums import envelope_digest
from baton.proto.wire.envelope import (
    EnvelopeDecoder,
    EnvelopeEncoder,
    decode_kv_header,
    encode_kv_header,
)
from baton.proto.wire.messages import (
    ClientToRouter,
    Commit,
    DecodeToPrefill,
    KVFrame,
    PrefillToDecode,
    RouterToClient,
    RouterToSupervisor,
    RouterToWorker,
    WorkerToRouter,
)
from baton.proto.wire.wire_context import WireContext, WireRequestID, WireSampling, WireTokens

GOLDEN = Path(__file__).parent / "golden" / "envelopes.json"
UNIONS = {
    "client_to_router": ClientToRouter,
    "router_to_client": RouterToClient,
    "worker_to_router": WorkerToRouter,
    "router_to_worker": RouterToWorker,
    "router_to_supervisor": RouterToSupervisor,
    "prefill_to_decode": PrefillToDecode,
    "decode_to_prefill": DecodeToPrefill,
}
MEMBERS = sorted(
    {cls.__name__: (cls, name) for name, union in UNIONS.items() for cls in get_args(union)}.items()
)


def sample(info, name="", full=True):
    """A fixed value of an inspected type, different for different fields."""
    if name == "arrays":
        return 0  # the encoder counts the array frames of a message
    seed = sum(name.encode())
    if isinstance(info, inspect.StructType):
        fields = [field for field in info.fields if full or field.required]
        return info.cls(**{field.name: sample(field.type, field.name, full) for field in fields})
    if isinstance(info, inspect.RawType):
        return CARRIED[name](full)
    if isinstance(info, inspect.UnionType):
        return sample(
            next(kind for kind in info.types if not isinstance(kind, inspect.NoneType)), name, full
        )
    if isinstance(info, inspect.ListType):
        return [sample(info.item_type, name + end, full) for end in ("", "+")]
    if isinstance(info, inspect.TupleType):
        return tuple(sample(item, name, full) for item in info.item_types)
    if isinstance(info, inspect.DictType):
        return {sample(info.key_type, name, full): sample(info.value_type, name, full)}
    return {
        inspect.IntType: seed,
        inspect.FloatType: seed / 8,
        inspect.BoolType: True,
        inspect.StrType: name,
        inspect.BytesType: struct.pack("<id", seed, -0.5) if name == "packed" else name.encode(),
    }[type(info)]


def sample_context(full):
    """The map of a new request's context, with all fields or with the required ones."""
    tokens = np.arange(642, 647, dtype=np.int32)
    if not full:
        return WireContext(tokens=WireTokens(tokens), max_length=1087)
    return WireContext(
        tokens=WireTokens(tokens),
        max_length=1087,
        request_id=WireRequestID("request_id"),
        sampling=sample(inspect.type_info(WireSampling)),
        model_name="model_name",
        eos_token_ids=[2, 3],
        eos_sequences=[[4, 5], [6]],
        log_probabilities=2,
        ignore_eos=True,
        json_schema="{}",
        target_endpoint="ipc:///target",
        cache_salt="salt",
    )


CARRIED = {
    "context": sample_context,
    "embedding": lambda full: np.arange(5, dtype=np.float32) if full else None,
}
"""What a message's own decoder leaves unread, by the name of its field."""


def golden_bytes():
    encode = EnvelopeEncoder().encode
    recorded = {"KVFrame": encode_kv_header(sample(inspect.type_info(KVFrame))).hex()}
    for name, (cls, _) in MEMBERS:
        info = inspect.type_info(cls)
        recorded[name] = {
            kind: [bytes(frame).hex() for frame in encode([sample(info, full=kind == "full")])]
            for kind in ("full", "least")
        }
    recorded["sealed"] = {kind: [f.hex() for f in sealed(kind)] for kind in ("full", "least")}
    return recorded


def sealed(kind):
    """Frames of a Commit between workers, its context long enough for a separate frame."""
    commit = sample(inspect.type_info(Commit), full=kind == "full")
    tokens = np.arange(1024, dtype=np.int32)
    context = msgspec.structs.replace(commit.context, tokens=WireTokens(tokens))
    commit = msgspec.structs.replace(commit, context=context)
    return [bytes(f) for f in EnvelopeEncoder(digest=envelope_digest).encode([commit])]


@pytest.fixture(scope="module")
def golden(request):
    if request.config.getoption("--write-golden", default=False):
        GOLDEN.write_text(json.dumps(golden_bytes(), indent=1, sort_keys=True) + "\n")
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("kind", ["full", "least"])
@pytest.mark.parametrize(("name", "member"), MEMBERS)
def test_recorded_bytes(golden, name, member, kind):
    """Recorded bytes decode to the same message, which is encoded to the same bytes.

    A new field with a default passes; one renamed, removed or of another type does not.
    """
    assert name in golden, "a new message: record it as described at the top of this file"
    cls, union = member
    frames = [bytes.fromhex(frame) for frame in golden[name][kind]]
    (message,) = EnvelopeDecoder(UNIONS[union]).decode(frames)
    assert type(message) is cls
    assert EnvelopeEncoder().encode([message]) == frames
    if kind == "least":
        assert message == sample(inspect.type_info(cls), full=False)


def test_recorded_kv_header(golden):
    frame = bytes.fromhex(golden["KVFrame"])
    assert decode_kv_header(frame) == sample(inspect.type_info(KVFrame))
    assert encode_kv_header(decode_kv_header(frame)) == frame


@pytest.mark.parametrize("kind", ["full", "least"])
def test_recorded_sealed_envelope(golden, kind):
    frames = [bytes.fromhex(frame) for frame in golden["sealed"][kind]]
    assert frames == sealed(kind)
    assert frames[0][3:11] == envelope_digest([frames[0][11:], frames[1]]).to_bytes(8, "little")
    (commit,) = EnvelopeDecoder(PrefillToDecode, digest=envelope_digest).decode(frames)
    assert commit.context.tokens.array.tolist() == list(range(1024))


def test_a_large_array_is_a_frame_of_its_own():
    cls = get_args(ClientToRouter)[0]
    message = sample(inspect.type_info(cls), full=False)
    tokens = np.arange(1024, dtype=np.int32)
    context = msgspec.structs.replace(message.context, tokens=WireTokens(tokens))
    frames = EnvelopeEncoder().encode([msgspec.structs.replace(message, context=context)])
    assert msgspec.msgpack.encode({"__np__": True, "frame": 1})[1:] in frames[0]
    assert bytes(frames[1]) == tokens.tobytes()


def test_no_message_is_missing_or_left_over(golden):
    assert set(golden) == {name for name, _ in MEMBERS} | {"KVFrame", "sealed"}
