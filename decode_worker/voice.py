"""The samples of one speech request on a decode worker: which chunk is next, which run carries it.

Invariant: a chunk travels in the run that ends with the token that completes it, and the last
chunks with the last token. So whoever has a token has its chunk, and a position in the tokens is
also a position in the samples. Pure: the shell decodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from baton.engine.audio.chunks import I32, AudioLayout, Window, chunk_end, next_window
from baton.proto.contexts.outputs import TokenLogProbs
from baton.proto.wire.messages import TokenRun
from baton.worker.attempts import Key
from baton.worker.token_replay import runs_again


class Codec(NamedTuple):
    """What the core knows about the codec. ``reach``: frames of context on each side of a chunk."""

    layout: AudioLayout
    reach: int


class Voice:
    """Tokens and chunks of one request, and how many of them were sent.

    ``first``: position of the first generated token. ``tokens``: all generated tokens so far.
    ``sent``: position of the first token that was not sent. ``oldest``: position of the first token
    from which on the sent chunks are kept.
    """

    def __init__(self, codec: Codec, first: int, tokens: Iterable[int]) -> None:
        self._codec = codec
        self._first = first
        self._tokens: list[int] = []
        self._entries = array("i")
        self._places: list[int] = []  # positions of the audio tokens
        self._made: dict[int, bytes] = {}  # chunks by their first frame
        self._asked: int | None = None  # first frame of the chunk that is being decoded
        self._frame = 0  # first frame of the next chunk to send
        self.status: str | None = None  # final status, after the last token
        for token in tokens:
            self.add(token)
        # A replay continues after tokens that were sent; of a new request, the prefill worker has
        # sent the only token, but its message may be lost.
        self.sent = first if len(self._tokens) == 1 else self.end
        self.oldest = self.sent

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self._first + len(self._tokens)

    @property
    def is_over(self) -> bool:
        """True if all tokens and chunks were sent and no token will follow."""
        return self.status is not None and self.sent == self.end

    def add(self, token: int) -> None:
        """Append a token."""
        entry = self._codec.layout.entries(np.array([token]))
        if len(entry):
            self._entries.append(int(entry[0]))
            self._places.append(self.end)
        self._tokens.append(token)

    def seek(self, position: int) -> None:
        """Send the tokens from ``position`` on again, with their chunks."""
        position = min(max(position, self._first), self.end)
        ahead = position > self.sent  # the chunks before it are not made here
        self.oldest = position if ahead else min(self.oldest, position)
        self.sent = position
        self._frame = 0

    def made(self, frame: int, samples: bytes) -> None:
        """Store the samples of the chunk that begins at ``frame``."""
        self._made[frame] = samples
        if self._asked == frame:
            self._asked = None

    def advance(
        self, key: Key, logprobs: Collection[TokenLogProbs]
    ) -> tuple[list[TokenRun], Window | None]:
        """Return the runs to send now, and the window to decode before the next one.

        ``logprobs``: of the newest tokens.
        """
        start, media, wanted = self.sent, dict[int, bytes](), None
        self.sent = self.end
        for window, position in self._chunks():
            if position < start:
                self._frame = window.end
                continue
            samples = self._made.get(window.first)
            if samples is None:
                self.sent = position
                media.pop(position, None)  # all chunks of the last token, or none
                if self._asked is None:
                    self._asked, wanted = window.first, window
                break
            media[position] = media.get(position, b"") + samples
        if self.sent == start:
            return [], wanted
        tokens = self._tokens[start - self._first : self.sent - self._first]
        later = self.end - self.sent
        known = list(logprobs)[: max(0, len(logprobs) - later)] if later else logprobs
        return runs_again(key, start, tokens, known, media), wanted

    def entries(self, window: Window) -> I32:
        """Return the codebook entries of a window, int32."""
        size = self._codec.layout.frame_tokens
        return np.array(self._entries[window.start * size : window.stop * size], np.int32)

    def kept(self) -> tuple[list[int], dict[int, bytes]]:
        """Return the tokens from ``oldest`` on, and the chunks by the position of their token."""
        media: dict[int, bytes] = {}
        self._frame = 0
        for window, position in self._chunks():
            if position >= self.oldest and window.first in self._made:
                media[position] = media.get(position, b"") + self._made[window.first]
        return self._tokens[self.oldest - self._first :], media

    def _chunks(self) -> Iterator[tuple[Window, int]]:
        """Yield the complete chunks from ``_frame`` on, with the positions of their tokens."""
        layout, reach = self._codec
        size, frame = layout.frame_tokens, self._frame
        frames = len(self._places) // size
        while window := next_window(frame, frames, reach, ended=self.status is not None):
            wanted = (chunk_end(frame) + reach) * size
            tail = wanted > len(self._places)
            yield window, self.end - 1 if tail else self._places[wanted - 1]
            frame = window.end
