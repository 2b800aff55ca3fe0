"""The controller's socket for operators: overview, scale, drain, rollout, down.

Each message is one frame: ``b"BA" | u8 version | msgpack`` of a tagged struct. A request receives
answers with its number until a :class:`Result`. Invariant: a message has at most
:data:`MAX_BYTES`. Malformed bytes are answered with an error and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from baton.proto.errors import BatonError, DecodeFailed, VersionMismatch
from baton.runtime.keys.zap import ServerKeys
from baton.runtime.net.channel import ChannelOptions, Frames
from baton.runtime.net.loop import Loop
from baton.runtime.net.sockets import Context, RouterChannel
from baton.runtime.process.log_limit import LimitedLog

ADMIN_VERSION = 1
MAGIC = b"BA"
MAX_BYTES = 64 << 10
_PREFIX = MAGIC + bytes([ADMIN_VERSION])

Number = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(max_length=128)]
Value = bool | int | float | Annotated[str, Meta(max_length=4096)]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of the requests of operators. ``number``: returned in every answer."""

    number: Number = 0


class Ask(Request, frozen=True, tag="ask"):
    """Ask for an :class:`Overview`."""


class ScalePools(Request, frozen=True, kw_only=True, tag="scale"):
    """Change the target sizes of these pools; other pools keep their size."""

    targets: Annotated[dict[Name, int], Meta(max_length=16)]


class DrainWorker(Request, frozen=True, kw_only=True, tag="drain"):
    """Drain and remove a worker. ``force``: also the last ready worker of its role."""

    worker: Name
    force: bool = False


class TurnWorker(Request, frozen=True, kw_only=True, tag="turn"):
    """Change the role of a worker, whose weights stay loaded."""

    worker: Name
    role: Name


class RollOut(Request, frozen=True, kw_only=True, tag="rollout"):
    """Replace every process. ``changes``: settings to change, with their new values.

    ``in_place``: stop each worker before its replacement starts, so that a pool needs no spare
    host.
    """

    changes: Annotated[dict[Name, Value], Meta(max_length=128)] = {}
    in_place: bool = False


class GoDown(Request, frozen=True, kw_only=True, tag="down"):
    """Stop the cluster. ``at_once``: without waiting for running requests."""

    at_once: bool = False


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="progress"):
    """The request is not finished. ``accepted``: first answer; the request is now carried out."""

    number: Number
    text: str
    accepted: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="result"):
    """The last answer. ``code``: error code of :mod:`baton.proto.errors`; empty: success."""

    number: Number
    text: str = ""
    code: str = ""


class MemberLine(msgspec.Struct, frozen=True, kw_only=True):
    """One process. ``note``: why it has no host. ``restarts``: number of restarts."""

    name: str
    role: str
    stage: str
    revision: int
    pid: int = 0
    host: str = ""
    note: str = ""
    restarts: int = 0


class Overview(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="overview"):
    """Target and actual state of the cluster.

    ``health``: "ok" or "degraded"; if degraded, ``problems`` has one sentence per process that
    should serve and does not. ``settings``: settings of the newest revision. ``launched``:
    settings at launch. ``http``: base URL of the gateways, if there are any. ``paths``: socket
    files that exist as long as the cluster. ``pid``: process id of the controller. ``role_change``:
    the last one, with its reason.
    """

    number: Number = 0
    phase: str = ""
    health: str = ""
    problems: list[str] = []
    backend: str = ""
    pid: int = 0
    address: str = ""
    http: str = ""
    log: str = ""
    revision: int = 0
    rollout: str = ""
    role_change: str = ""
    targets: dict[str, int] = {}
    members: list[MemberLine] = []
    settings: dict[str, Value] = {}
    launched: dict[str, Value] = {}
    paths: list[str] = []


Requests = Ask | ScalePools | DrainWorker | TurnWorker | RollOut | GoDown
Answers = Progress | Result | Overview

Kind = TypeVar("Kind")

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Requests] = msgspec.msgpack.Decoder(Requests)
_answers: msgspec.msgpack.Decoder[Answers] = msgspec.msgpack.Decoder(Answers)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message to one frame."""
    return _PREFIX + _encoder.encode(message)


def decode_request(data: bytes | memoryview) -> Requests:
    """Decode a request. Raises DecodeFailed, VersionMismatch."""
    return _decode(data, _requests)


def decode_answer(data: bytes | memoryview) -> Answers:
    """Decode an answer. Raises DecodeFailed, VersionMismatch."""
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
    """The listening socket. Calls ``on_request(sender, request)`` for each request."""

    def __init__(
        self,
        loop: Loop,
        context: Context,
        address: str,
        on_request: Callable[[bytes, Requests], object],
        keys: ServerKeys | None = None,
    ) -> None:
        options = ChannelOptions(
            max_frame_bytes=MAX_BYTES, max_frames=1, send_hwm=256,
            heartbeat_s=1.0, heartbeat_timeout_s=5.0,
        )  # fmt: skip
        self._on_request = on_request
        self._log = LimitedLog(loop)
        self._channel = RouterChannel(context, address, keys=keys, options=options)
        self.endpoint = self._channel.endpoint
        self._channel.attach(loop, self._on_message)

    def answer(self, sender: bytes, message: Answers) -> None:
        """Send an answer. It is dropped if the client disconnected or does not read."""
        self._channel.send(sender, [encode(message)])

    def close(self) -> None:
        """Stop listening."""
        self._channel.close()

    def _on_message(self, sender: bytes, frames: Frames) -> None:
        try:
            request = decode_request(frames[0] if frames else b"")
        except BatonError as problem:
            self._log.warning("admin.malformed", error=str(problem))
            self.answer(sender, Result(number=0, text=str(problem), code=problem.code))
            return
        self._on_request(sender, request)
