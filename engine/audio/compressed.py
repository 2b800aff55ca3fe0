"""16-bit samples of one channel as MP3, Opus or AAC, by PyAV (the extra ``audio``).

The stream is written as it is encoded: nothing in it depends on its length.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.proto.errors import InputError

CODECS = {
    "mp3": ("mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}),
    "opus": ("ogg", "libopus", {"page_duration": "100000"}),  # microseconds
    "aac": ("adts", "aac", {}),
}
"""Container, encoder, and options of the container by the name of the format."""


class CompressedEncoder:
    """Encodes one stream. Raises InputError if the extra is not installed."""

    def __init__(self, form: str, sample_rate: int) -> None:
        av = _library(form)
        container, codec, options = CODECS[form]
        self._av = av
        self._rate = sample_rate
        self._sink = _Sink()
        self._output = av.open(self._sink, "w", format=container, options=options)
        # Opus has few rates; the library resamples what it is given.
        rate = 48_000 if form == "opus" else sample_rate
        self._stream: Any = self._output.add_stream(codec, rate=rate, layout="mono")

    def encode(self, samples: npt.NDArray[np.int16]) -> bytes:
        """Return the bytes that are complete after more samples, perhaps none."""
        frame = self._av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = self._rate
        self._output.mux(self._stream.encode(frame))
        return self._sink.take()

    def finish(self) -> bytes:
        """Return the last bytes."""
        self._output.mux(self._stream.encode(None))
        self._output.close()
        return self._sink.take()


class _Sink:
    """A file that the library writes and cannot seek."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        """Keep a part."""
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> bytes:
        """Return what was written since the last call."""
        taken, self._parts = b"".join(self._parts), []
        return taken


def _library(form: str) -> Any:
    try:
        return import_module("av")
    except ImportError:
        raise InputError(
            f"response_format {form} needs PyAV: pip install 'baton-serve[audio]' for the gateway"
        ) from None
