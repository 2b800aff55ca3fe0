"""``POST /v1/audio/speech``: audio as it is generated.

Decode workers send the samples, so the gateway needs no codec.
The response begins with the first chunk of audio: an error up to there has its own status. After a
later error the connection ends before the body does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal, Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from baton.client.speech import I16, AudioPrompt, audio_card, speech_format
from baton.engine.audio.compressed import CODECS, CompressedEncoder
from baton.engine.audio.flac import FlacEncoder
from baton.engine.audio.pcm import wav_header
from baton.proto.contexts.speech import TTSContext
from baton.proto.errors import InputError, RequestCancelled
from baton.proto.sampling import SamplingParams

from .bodies import Body, BodyReader, Count, Warnings
from .errors import ParameterError, RouteNotFound
from .field_rules import Rules
from .parameters import renamed
from .served import Served, name_of, origin_of, read_body, target_of
from .streams import unless_gone

MAX_INPUT_CHARS = 4096
DEFAULT_TOKENS = 2048
FORMATS = {
    "wav": b"audio/wav",
    "pcm": b"audio/pcm",
    "flac": b"audio/flac",
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "aac": b"audio/aac",
}
"""Content types of the formats that are written."""
Chunks = AsyncGenerator[I16, None]


class SpeechBody(Body, kw_only=True):
    """``POST /v1/audio/speech``. ``max_tokens``: audio tokens, seven per frame.

    ``audio_prompt_tokens``, ``audio_prompt_text``: a voice by its audio, instead of ``voice``.
    """

    input: str
    voice: str | None = None
    response_format: Literal["wav", "pcm", "flac", "mp3", "opus", "aac"] | None = "wav"
    audio_prompt_tokens: list[int] | None = None
    audio_prompt_text: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None

    # Refused; see SPEECH_REFUSED.
    speed: Any = None
    instructions: Any = None
    stream_format: Any = None


SPEECH_REFUSED: Rules = {
    "speed": ((1, 1.0), "the model decides the speed"),
    "instructions": (("",), "the model takes none"),
    "stream_format": (("audio",), "audio is streamed as the body"),
}
_reader = BodyReader(SpeechBody, SPEECH_REFUSED)
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos")


async def speech(request: Request) -> AudioResponse:
    """``POST /v1/audio/speech``. Raises RouteNotFound if the model does not speak."""
    served = Served.of(request)
    model = await served.model()
    if TTSContext.__name__ not in model.card.kinds:
        raise RouteNotFound(f"{request.url.path}: this cluster serves no speech model")
    body, warnings = _reader.read(await read_body(request), strict=served.strict_parameters)
    await served.model(body.model)
    form = body.response_format or "wav"
    if len(body.input) > MAX_INPUT_CHARS:
        text = f"input has {len(body.input)} characters, at most {MAX_INPUT_CHARS} are allowed"
        raise ParameterError(text, "input")
    params = _sampling_of(body)
    options = origin_of(request) | target_of(request)
    options["request_id"] = name_of("speech", request)
    voice = voice_of(body)
    if isinstance(voice, str) and not speech_format(model).voices:
        voice = one_voice(voice, warnings, strict=served.strict_parameters)
    encoder = encoder_of(form, audio_card(model).sample_rate)
    chunks = served.client.speak(body.input, params, voice=voice, **options)
    try:
        return await AudioResponse.begin(request.receive, chunks, form, encoder, warnings)
    except InputError as error:
        if type(error) is InputError:
            raise renamed(error, body.__struct_fields__) from None
        raise


def one_voice(voice: str, warnings: Warnings, *, strict: bool) -> str | None:
    """Return the voice for a model without named ones, and note that it is ignored.

    The client of OpenAI always sends a voice. Strictly, it is left to the model, which refuses it.
    """
    if strict:
        return voice
    warnings.append("voice is ignored: the model has no named voices")
    return None


def voice_of(body: SpeechBody) -> str | AudioPrompt | None:
    """Return the voice. Raises ParameterError for two voices, or for a text without its audio."""
    tokens, text = body.audio_prompt_tokens, body.audio_prompt_text
    if tokens is None:
        if text:
            raise ParameterError("audio_prompt_text needs audio_prompt_tokens", "audio_prompt_text")
        return body.voice
    if body.voice:
        raise ParameterError("voice cannot be combined with audio_prompt_tokens", "voice")
    return AudioPrompt(tokens, text or "")


def _sampling_of(body: SpeechBody) -> SamplingParams:
    given = {name: getattr(body, name) for name in _SAME}
    given["max_new_tokens"] = body.max_tokens or DEFAULT_TOKENS
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except InputError as error:
        name = str(error).split(" ", 1)[0]
        name = "max_tokens" if name == "max_new_tokens" else name
        raise ParameterError(str(error).replace("max_new_tokens", name, 1), name) from None


class Encoder(Protocol):
    """Writes one stream of samples in a format."""

    def encode(self, samples: I16, /) -> bytes:
        """Return the bytes of more samples."""
        ...

    def finish(self) -> bytes:
        """Return the last bytes."""
        ...


class _Wav:
    """WAV whose header leaves the length open, or the bare samples."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def encode(self, samples: I16) -> bytes:
        header, self._header = self._header, b""
        return header + samples.tobytes()

    def finish(self) -> bytes:
        return b""


class _Flac:
    def __init__(self, sample_rate: int) -> None:
        self._encoder = FlacEncoder(sample_rate)
        self._header = self._encoder.header()

    def encode(self, samples: I16) -> bytes:
        header, self._header = self._header, b""
        return header + self._encoder.encode(samples)

    def finish(self) -> bytes:
        return b""


def encoder_of(form: str, sample_rate: int) -> Encoder:
    """Return an encoder. Raises ParameterError for a format whose library is missing."""
    if form == "flac":
        return _Flac(sample_rate)
    if form in CODECS:
        try:
            return CompressedEncoder(form, sample_rate)
        except InputError as error:
            raise ParameterError(str(error), "response_format") from None
    return _Wav(wav_header(sample_rate) if form == "wav" else b"")


class AudioResponse:
    """Chunks of audio as the body of a response, an ASGI application.

    ``warnings``: go into the header ``x-warnings``, as JSON in ASCII.
    """

    def __init__(
        self, first: bytes, chunks: Chunks, form: str, encoder: Encoder, warnings: Warnings
    ) -> None:
        self._first = first
        self._chunks = chunks
        self._encoder = encoder
        self._headers = [(b"content-type", FORMATS[form]), (b"cache-control", b"no-cache")]
        if warnings:
            self._headers.append((b"x-warnings", json.dumps(warnings).encode()))

    @classmethod
    async def begin(
        cls, receive: Receive, chunks: Chunks, form: str, encoder: Encoder, warnings: Warnings
    ) -> AudioResponse:
        """Wait for the first chunk. Raises the error of a request that fails before."""
        try:
            first = await unless_gone(receive, anext(chunks))
        except BaseException:
            await chunks.aclose()
            raise
        return cls(encoder.encode(first), chunks, form, encoder, warnings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks until the last one, or until the client is gone."""
        async with aclosing(self._chunks):
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await send(start)
            try:
                await unless_gone(receive, self._send(send))
            except RequestCancelled:
                return
            last = self._encoder.finish()
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for chunk in self._chunks:
            body = self._encoder.encode(chunk)
            await send({"type": "http.response.body", "body": body, "more_body": True})
