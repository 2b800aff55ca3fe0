"""Types that users declare: values arrive, and memory stays within a multiple of the message."""

import contextlib
import dataclasses
from enum import Enum
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
import pytest

from baton.proto import (
    GenerationStatus,
    RequestID,
    SchedulerResult,
    TextGenerationOutput,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)
from baton.proto.errors import DecodeFailed, LimitExceeded

from ..suite.short import some_long
from .test_fuzz_contexts import FACTOR, MARGIN, peak_bytes

T = TypeVar("T")
U = TypeVar("U")


class Colour(Enum):
    RED = 1


@dataclasses.dataclass
class Rows:
    value: list[list[int]]


@dataclasses.dataclass
class Sets:
    value: list[set[int]]


@dataclasses.dataclass
class Numbers:
    value: list[int]


@dataclasses.dataclass
class Anything:
    value: Any = None


@dataclasses.dataclass
class Either:
    value: list[list[int]] | np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Hashable:
    value: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass
class Colours:
    value: Annotated[list[list[Colour]], msgspec.Meta(max_length=1 << 30)]


@dataclasses.dataclass
class Result(Generic[T]):
    value: T
    more: list[T] = dataclasses.field(default_factory=list)


class Pair(msgspec.Struct, Generic[T, U]):
    value: T
    other: U | None = None


@dataclasses.dataclass
class Bound(Result[list[set[int]]]):
    name: str = ""


@dataclasses.dataclass
class Deep:
    value: Result[list[Result[list[list[int]]]]]


def repeated(unit, count):
    return b"\xdd" + count.to_bytes(4, "big") + unit * count


def value(content):
    return b"\x81" + msgspec.msgpack.encode("value") + content


def floods(size):
    """The values with the most memory per byte, in each place where a message allows them."""
    for unit in (b"\x90", b"\xf0", b"\x91\xf0", value(b"\x01")):
        many = repeated(unit, size // len(unit))
        yield from (many, value(many), value(value(many)), b"\x92\xc0" + many)
        yield repeated(value(repeated(unit, 16)), size // (12 + 16 * len(unit)))
        yield value(value(repeated(value(repeated(unit, 50)), size // (12 + 50 * len(unit)))))


DECLARED = [
    Rows, Sets, Numbers, Anything, Either, Hashable, Colours, Deep, Bound,
    Result[int], list[Result[int]], Result[list[list[int]]], Pair[int, list[set[int]]],
    Pair[list[Any], int], list[Pair[int, int]], list[Rows], dict[str, Sets], set[Hashable],
    tuple[np.ndarray | None, list[list[int]]], tuple[np.ndarray | None, list[int]],
    list[list[Colour]], list[list[Literal["a", "b"]]],
]  # fmt: skip


@pytest.mark.parametrize("declared", [*DECLARED[:8], *some_long(*DECLARED[8:])], ids=str)
def test_memory_of_declared_types(declared):
    decode = msgpack_numpy_decoder(declared)

    def give(message):
        with contextlib.suppress(DecodeFailed, LimitExceeded):
            decode(message)

    for message in floods(50_000):
        peak = peak_bytes(lambda message=message: give(message))
        assert peak < FACTOR * len(message) + MARGIN, message[:40]


LISTS, SMALL_NUMBERS = repeated(b"\x90", 500_000), repeated(b"\xf0", 500_000)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (Rows, value(LISTS)),
        (Numbers, value(SMALL_NUMBERS)),
        (Anything, value(LISTS)),
        (Either, value(LISTS)),
        (Hashable, value(LISTS)),
        (Bound, value(LISTS)),
        (Result[int], b"\x82" + value(b"\0")[1:] + b"\xa4more" + SMALL_NUMBERS),
        (Result[list[list[int]]], value(LISTS)),
        (Pair[list[Any], int], value(LISTS)),
        (tuple[np.ndarray | None, list[int]], b"\x92\xc0" + SMALL_NUMBERS),
    ],
    ids=lambda part: None if isinstance(part, bytes) else str(part),
)
def test_values_far_larger_than_their_bytes_are_refused(declared, message):
    decode = msgpack_numpy_decoder(declared)
    with pytest.raises(LimitExceeded, match="much larger than its bytes"):
        decode(message)


VALUES = [
    (Rows, Rows([[i, -3] for i in range(5000)])),
    (Sets, Sets([{1, 2}, set()])),
    (Numbers, Numbers([-20] * 3000)),
    (Numbers, Numbers(list(range(50_000)))),
    (Anything, Anything({"a": [1, {"b": [2.5, None]}]})),
    (Anything, Anything()),
    (Either, Either([[1], []])),
    (Hashable, Hashable(((1, 2), ()))),
    (set[Hashable], {Hashable(((1,),)), Hashable()}),
    (Colours, Colours([[Colour.RED], []])),
    (Deep, Deep(Result([Result([[1], [2]])], []))),
    (Bound, Bound([{1}], [[{2}]], "name")),
    (list[Result[int]], [Result(1, [2, 3]), Result(-7)]),
    (Result[RequestID], Result(RequestID("a"), [RequestID("b")])),
    (Pair[int, list[str]], Pair(1, ["two"])),
    (list[Pair[int, list[int]]], [Pair(1, [2, 3]), Pair(2)]),
]


@pytest.mark.parametrize(("declared", "content"), VALUES, ids=str)
def test_values_of_declared_types_arrive(declared, content):
    encode, decode = msgpack_numpy_encoder(), msgpack_numpy_decoder(declared)
    assert decode(encode(content)) == content


def test_arrays_and_outputs_in_generic_records():
    encode = msgpack_numpy_encoder()
    sent = Result(np.arange(3), [np.ones(2), np.zeros((2, 2))])
    found = msgpack_numpy_decoder(Result[np.ndarray])(encode(sent))
    assert type(found) is Result
    assert found.value.tolist() == [0, 1, 2]
    assert [array.tolist() for array in found.more] == [[1, 1], [[0, 0], [0, 0]]]
    output = TextGenerationOutput(
        request_id=RequestID("a"), tokens=[1, 2], final_status=GenerationStatus.ACTIVE
    )
    result = SchedulerResult.create(output)
    assert msgpack_numpy_decoder(SchedulerResult[TextGenerationOutput])(encode(result)) == result


@dataclasses.dataclass
class Node:
    array: np.ndarray
    children: list["Node"] = dataclasses.field(default_factory=list)


def test_a_record_that_holds_itself_is_refused_by_name():
    with pytest.raises(TypeError, match=r"Node.* holds itself"):
        msgpack_numpy_decoder(Node)
