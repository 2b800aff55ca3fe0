"""``POST /v1/audio/speech``: audio as it is generated.

Decode workers send the samples, so the gateway needs no codec.
The response begins with the first chunk of audio: an error up to there has its own status. After a
later error the connection ends before the body does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Literal

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ..client.speech import I16, AudioPrompt, audio_card
from ..engine.audio.flac import FlacEncoder
from ..engine.audio.pcm import wav_header
from ..proto.contexts.speech import TTSContext
from ..proto.errors import InputError, RequestCancelled
from ..proto.sampling import SamplingParams
from .bodies import Body, BodyReader, Count, Refused
from .errors import ParameterError, RouteNotFound
from .parameters import renamed
from .served import Served, name_of, origin_of, read_body, target_of
from .streams import unless_gone

MAX_INPUT_CHARS = 4096
DEFAULT_TOKENS = 2048
FORMATS = {"wav": b"audio/wav", "pcm": b"audio/pcm", "flac": b"audio/flac"}
"""Content types of the formats that are written."""
Chunks = AsyncGenerator[I16, None]
Encode = Callable[[I16], bytes]


class SpeechBody(Body, kw_only=True):
    """``POST /v1/audio/speech``. ``max_tokens``: audio tokens, seven per frame.

    ``audio_prompt_tokens``, ``audio_prompt_text``: a voice by its audio, instead of ``voice``.
    """

    input: str
    voice: str | None = None
    response_format: Literal["wav", "pcm", "flac"] | None = "wav"
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

    # Accepted with their neutral values only; see SPEECH_REFUSED.
    speed: Any = None
    instructions: Any = None
    stream_format: Any = None


SPEECH_REFUSED: Refused = {
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
    body = _reader.read(await read_body(request))
    await served.model(body.model)
    form = body.response_format or "wav"
    if len(body.input) > MAX_INPUT_CHARS:
        text = f"input has {len(body.input)} characters, at most {MAX_INPUT_CHARS} are allowed"
        raise ParameterError(text, "input")
    params = _sampling_of(body)
    options = origin_of(request) | target_of(request)
    options["request_id"] = name_of("speech", request)
    chunks = served.client.speak(body.input, params, voice=_voice_of(body), **options)
    rate = audio_card(model).sample_rate
    try:
        return await AudioResponse.begin(request.receive, chunks, form, rate)
    except InputError as error:
        if type(error) is InputError:
            raise renamed(error, body.__struct_fields__) from None
        raise


def _voice_of(body: SpeechBody) -> str | AudioPrompt | None:
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


class AudioResponse:
    """Chunks of audio as the body of a response, an ASGI application."""

    def __init__(self, first: bytes, chunks: Chunks, form: str, encode: Encode) -> None:
        self._first = first
        self._chunks = chunks
        self._form = form
        self._encode = encode

    @classmethod
    async def begin(
        cls, receive: Receive, chunks: Chunks, form: str, sample_rate: int
    ) -> AudioResponse:
        """Wait for the first chunk. Raises the error of a request that fails before."""
        head, encode = _format(form, sample_rate)
        try:
            first = await unless_gone(receive, anext(chunks))
        except BaseException:
            await chunks.aclose()
            raise
        return cls(head + encode(first), chunks, form, encode)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks until the last one, or until the client is gone."""
        headers = [(b"content-type", FORMATS[self._form]), (b"cache-control", b"no-cache")]
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await unless_gone(receive, self._send(send))
            except RequestCancelled:
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for chunk in self._chunks:
            body = self._encode(chunk)
            await send({"type": "http.response.body", "body": body, "more_body": True})


def _format(form: str, sample_rate: int) -> tuple[bytes, Encode]:
    """Return the beginning of a body, and the function that encodes its chunks."""
    if form == "flac":
        encoder = FlacEncoder(sample_rate)
        return encoder.header(), encoder.encode
    return wav_header(sample_rate) if form == "wav" else b"", lambda chunk: chunk.tobytes()
