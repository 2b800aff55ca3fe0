"""Requests for pictures through the native client, and the same pictures in one process."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from baton.client import Client
from baton.client.events import Ended, NewTokens, RequestSpec
from baton.engine.pictures.draw import PictureEngine
from baton.proto.contexts.pixels import PixelContext
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.wire_context import WireContext

from ..processes import wait_until
from .driver import lost_requests

if TYPE_CHECKING:
    from .conftest import Cluster

FOLDER = Path(__file__).resolve().parents[1] / "data" / "pictures" / "flux"
PROMPT_TOKENS = 48

_numbers = itertools.count()
Pixels = npt.NDArray[np.uint8]


class Drawing:
    """A running request: its steps as they arrive, then its end."""

    def __init__(
        self, client: Client, context: PixelContext, wire: WireContext | None = None
    ) -> None:
        """``wire``: sent instead of the context."""
        self._client = client
        self._news: queue.SimpleQueue[NewTokens | Ended] = queue.SimpleQueue()
        self.steps: list[int] = []
        self.positions: list[int] = []
        self.ended: Ended | None = None
        name = f"picture-{next(_numbers)}"
        spec = RequestSpec(request_id=name, context=wire or to_map(context))
        background = client._background
        connection, sink = background.connection, self._news.put
        background.post(lambda: connection.start(spec, sink))
        self._stop = lambda: background.post(lambda: connection.stop(name, sink, report=True))

    def _take(self) -> None:
        news = self._client._background.wait(self._news)
        if isinstance(news, Ended):
            self.ended = news
        elif isinstance(news, NewTokens):
            self.positions += range(news.position, news.position + len(news.tokens))
            self.steps += news.tokens

    def until(self, step: int) -> Drawing:
        """Wait until a step is done, or for the end."""
        while self.ended is None and step not in self.steps:
            self._take()
        return self

    def cancel(self) -> Drawing:
        """Cancel the request, and wait for its end."""
        self._stop()
        return self.wait()

    def wait(self) -> Drawing:
        """Wait for the end."""
        while self.ended is None:
            self._take()
        return self

    def pixels(self) -> Pixels:
        """Wait for the end, check the steps, and return the picture."""
        ended = self.wait().ended
        assert ended is not None
        if ended.error is not None:
            raise ended.error
        assert ended.media is not None
        assert self.steps == list(range(len(self.steps)))
        assert self.positions == list(range(self.positions[0], self.positions[0] + len(self.steps)))
        return read_png(ended.media)


def read_png(content: bytes) -> Pixels:
    """Return the pixels of a PNG whose rows have the filter sub, ``[height, width, 3]``."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, data = 8, b""
    size = (0, 0)
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == int.from_bytes(content[at + 8 + length :][:4], "big")
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
            assert body[8:] == bytes([8, 2, 0, 0, 0])
        elif kind == b"IDAT":
            data += body
        at += length + 12
    width, height = size
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + 3 * width)
    assert (rows[:, 0] == 1).all()
    return np.cumsum(rows[:, 1:].reshape(height, width, 3), axis=1, dtype=np.uint8)


@dataclass
class Reference:
    """The engine in one process, which remembers its pictures."""

    engine: PictureEngine = field(
        default_factory=lambda: PictureEngine(FOLDER, prompt_tokens=PROMPT_TOKENS)
    )

    def request(self, prompt: str = "a red cube", **fields: object) -> PixelContext:
        settings: dict[str, object] = {
            "height": 48, "width": 32, "num_inference_steps": 4, "seed": 7,
        }  # fmt: skip
        return self.engine.request(prompt, **{**settings, **fields})  # type: ignore[arg-type]

    def draw(self, context: PixelContext) -> Pixels:
        """Return the pixels of a request, without changing it."""
        copy = PixelContext(
            **{
                name: getattr(context, name)
                for name in PixelContext.__dataclass_fields__
                if name != "type"
            }
        )
        return self.engine.draw(copy)


def lose(
    pools: Cluster,
    client: Client,
    reference: Reference,
    name: str,
    step: int | None,
    requests: Sequence[PixelContext],
) -> None:
    """Kill a worker when the first picture has reached a step; all pixels must be right."""
    expected = [reference.draw(request) for request in requests]
    before = lost_requests(pools)
    for attempt in range(6):  # on a busy machine the blow may come when all is over
        if attempt and name.startswith("decode"):  # pictures of known prompts go to the other one
            name = f"decode-{1 - int(name[-1])}"
        pid = pools.pids()[name]
        running = [Drawing(client, request) for request in requests]
        if step is not None:
            running[0].until(step)
        os.kill(pid, signal.SIGKILL)
        for drawing, request, pixels in zip(running, requests, expected, strict=True):
            assert np.array_equal(drawing.pixels(), pixels)
            assert drawing.steps == list(range(request.num_inference_steps + 1))
        pools.wait_replaced(name, pid)
        if lost_requests(pools) > before:
            return
    pytest.fail("nothing ran on the lost worker")


def lose_a_stopped_one(
    pools: Cluster,
    client: Client,
    reference: Reference,
    role: str,
    requests: Sequence[PixelContext],
) -> None:
    """Stop both workers of a role while pictures begin, and kill one; all pixels must be right."""
    names = [f"{role}-0", f"{role}-1"]
    pids = [pools.pids()[name] for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    running = [Drawing(client, request) for request in requests]
    wait_until(
        lambda: client.status()["router"]["requests"]["in_flight"] == len(requests),
        what="requests at workers",
    )
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGCONT)
    for drawing, request in zip(running, requests, strict=True):
        assert np.array_equal(drawing.pixels(), reference.draw(request))
    pools.wait_replaced(names[0], pids[0])
