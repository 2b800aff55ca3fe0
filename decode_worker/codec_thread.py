"""The thread of a decode worker that decodes audio tokens to samples."""

from __future__ import annotations

from collections.abc import Callable

from ..engine.audio.chunks import AudioDecoder
from ..engine.audio.pcm import pcm16
from ..runtime.net.loop import Loop
from ..runtime.process.compute import ComputeThread
from ..runtime.process.log import get_logger
from . import events

_log = get_logger()


class CodecThread:
    """Decodes chunks of samples one after the other, while steps run on the compute thread.

    Each request has at most one chunk in the queue, so requests take turns.
    """

    def __init__(
        self, loop: Loop, audio: AudioDecoder, feed: Callable[[events.ChunkDecoded], None]
    ) -> None:
        self._audio = audio
        self._feed = feed
        self._thread: ComputeThread[events.DecodeChunk, bytes] = ComputeThread(
            loop, self._decode, self._done, name="codec"
        )

    def submit(self, wanted: events.DecodeChunk) -> None:
        """Queue a chunk."""
        self._thread.submit(wanted)

    def stop(self) -> bool:
        """Drop queued chunks and wait for the running one. Return False if it still runs."""
        return self._thread.stop()

    def _decode(self, wanted: events.DecodeChunk) -> bytes:
        return pcm16(self._audio.decode(wanted.window, wanted.entries))

    def _done(self, wanted: events.DecodeChunk, result: bytes | Exception) -> None:
        if isinstance(result, Exception):
            _log.error("codec.failed", error=repr(result))
        self._feed(events.ChunkDecoded(wanted.key, wanted.window.first, result))
