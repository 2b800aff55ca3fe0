"""The controller's socket for operators: scale, drain, rollout, down, and what is the case.

One frame a message: ``b"BA" | u8 version | msgpack`` of a tagged struct. A request gets answers
with its number until a :class:`Result`. Invariant: whatever bytes come, at most :data:`MAX_BYTES`
of them are read, and a message that is none is answered with an error and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ..proto.errors import BatonError, DecodeFailed, VersionMismatch
from ..runtime.channel import ChannelOptions, Frames
from ..runtime.limited_log import LimitedLog
from ..runtime.loop import Loop
from ..runtime.sockets import Context, RouterChannel
from ..runtime.zap import ServerKeys

ADMIN_VERSION = 1
MAGIC = b"BA"
MAX_BYTES = 64 << 10
_PREFIX = MAGIC + bytes([ADMIN_VERSION])

Number = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(max_length=128)]
Value = bool | int | float | Annotated[str, Meta(max_length=4096)]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what operators send; ``number``: comes back with every answer."""

    number: Number = 0


class Ask(Request, frozen=True, tag="ask"):
    """What is the case? Answered by an Overview."""


class ScalePools(Request, frozen=True, kw_only=True, tag="scale"):
    """Have pools of this size; others stay as they are."""

    targets: Annotated[dict[Name, int], Meta(max_length=16)]


class DrainWorker(Request, frozen=True, kw_only=True, tag="drain"):
    """Take a worker out; ``force``: also the last ready one of its role."""

    worker: Name
    force: bool = False


class RollOut(Request, frozen=True, kw_only=True, tag="rollout"):
    """Replace every process; ``changes``: settings that become others.

    ``in_place``: each worker leaves before its successor starts, so no room for one more is needed.
    """

    changes: Annotated[dict[Name, Value], Meta(max_length=128)] = {}
    in_place: bool = False


class GoDown(Request, frozen=True, kw_only=True, tag="down"):
    """End everything; ``at_once``: without waiting for requests."""

    at_once: bool = False


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="progress"):
    """Not done yet. ``accepted``: the first word, it will be done unless something fails."""

    number: Number
    text: str
    accepted: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="result"):
    """The last answer; ``code``: of the error, as everywhere; empty: done."""

    number: Number
    text: str = ""
    code: str = ""


class MemberLine(msgspec.Struct, frozen=True, kw_only=True):
    """One member; ``note``: why it has no host. ``restarts``: how often it was started again."""

    name: str
    role: str
    stage: str
    revision: int
    pid: int = 0
    host: str = ""
    note: str = ""
    restarts: int = 0


class Overview(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="overview"):
    """What is wanted and what is there.

    ``health``: "ok" or "degraded"; then ``problems`` names what should serve and does not.
    ``settings``: of the newest revision that is served. ``launched``: those it was launched with.
    ``paths``: socket files that go when the cluster does. ``pid``: of the controller.
    """

    number: Number = 0
    phase: str = ""
    health: str = ""
    problems: list[str] = []
    backend: str = ""
    pid: int = 0
    address: str = ""
    log: str = ""
    revision: int = 0
    rollout: str = ""
    targets: dict[str, int] = {}
    members: list[MemberLine] = []
    settings: dict[str, Value] = {}
    launched: dict[str, Value] = {}
    paths: list[str] = []


Requests = Ask | ScalePools | DrainWorker | RollOut | GoDown
Answers = Progress | Result | Overview

Kind = TypeVar("Kind")

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Requests] = msgspec.msgpack.Decoder(Requests)
_answers: msgspec.msgpack.Decoder[Answers] = msgspec.msgpack.Decoder(Answers)


def encode(message: msgspec.Struct) -> bytes:
    """One message's frame."""
    return _PREFIX + _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> Requests:
    """A request; DecodeFailed or VersionMismatch for anything else."""
    return _decode(data, _requests)


def decode_answer(data: bytes | memoryview) -> Answers:
    """An answer; DecodeFailed or VersionMismatch for anything else."""
    return _decode(data, _answers)


def _decode(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[Kind]) -> Kind:
    head = bytes(data[: len(_PREFIX)])
    if head[: len(MAGIC)] != MAGIC or len(head) < len(_PREFIX):
        raise DecodeFailed("not a message to a controller")
    if head != _PREFIX:
        raise VersionMismatch(f"admin version {head[-1]}, this is {ADMIN_VERSION}")
    try:
        return decoder.decode(bytes(data[len(_PREFIX) :]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeFailed(f"not a message to a controller: {error}") from error


class AdminServer:
    """The listening socket. ``on_request(sender, request)`` hears what was asked."""

    def __init__(
        self,
        loop: Loop,
        context: Context,
        address: str,
        on_request: Callable[[bytes, Requests], object],
        keys: ServerKeys | None = None,
    ) -> None:
        options = ChannelOptions(
            max_frame_bytes=MAX_BYTES, max_frames=1, send_hwm=256, receive_hwm=256,
            heartbeat_s=1.0, heartbeat_timeout_s=5.0,
        )  # fmt: skip
        self._on_request = on_request
        self._log = LimitedLog(loop)
        self._channel = RouterChannel(context, address, keys=keys, options=options)
        self.endpoint = self._channel.endpoint
        self._channel.attach(loop, self._hear)

    def answer(self, sender: bytes, message: Answers) -> None:
        """Send an answer; somebody who is gone or does not read misses it."""
        self._channel.send(sender, [encode(message)])

    def close(self) -> None:
        """Stop listening."""
        self._channel.close()

    def _hear(self, sender: bytes, frames: Frames) -> None:
        try:
            request = decode_request(frames[0] if frames else b"")
        except BatonError as problem:
            self._log.warning("admin.malformed", error=str(problem))
            self.answer(sender, Result(number=0, text=str(problem), code=problem.code))
            return
        self._on_request(sender, request)
