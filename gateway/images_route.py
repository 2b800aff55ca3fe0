"""``POST /v1/images/generations``: pictures of a prompt, in the shape of OpenAI's API.

Each picture is a separate request in the cluster. If one fails, or if the HTTP client closes its
connection, all of them are cancelled. With ``stream`` there is one picture, whose previews are
events.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from baton.client.options import BATCH_RETRIES
from baton.client.pictures import Picture, PictureOptions
from baton.proto.errors import InputError
from baton.proto.limits import MAX_PREVIEWS
from baton.proto.picture_requests import PICTURE_MULTIPLE
from baton.proto.sampling import MAX_SEED

from .bodies import Body, BodyReader, Warnings
from .errors import ParameterError, RouteNotFound
from .field_rules import Rules
from .served import Served, name_of, origin_of, read_body, target_of
from .streams import EventStream, unless_gone

MAX_PICTURES = 10
MAX_ANSWER_PIXELS = 16 << 20
"""Of all pictures of one answer, which is made in memory: as PNG files up to 48 MiB."""
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")


class ImagesBody(Body, kw_only=True):
    """``POST /v1/images/generations``. From ``seed`` on: fields that OpenAI does not have."""

    prompt: str
    n: Annotated[int, Meta(ge=1, le=MAX_PICTURES)] | None = 1
    size: str | None = "auto"
    seed: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    true_cfg_scale: float | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=MAX_PREVIEWS)] | None = None

    response_format: Literal["url", "b64_json"] | None = None

    # Refused or ignored; see IMAGES_REFUSED and IMAGES_IGNORED.
    output_format: Any = None
    output_compression: Any = None
    quality: Any = None
    style: Any = None
    background: Any = None
    moderation: Any = None


IMAGES_REFUSED: Rules = {
    "output_format": (("png",), "pictures are PNG files"),
    "background": (("auto", "opaque"), "pictures are opaque"),
}
IMAGES_IGNORED: Rules = {
    "output_compression": ((100,), "PNG files lose nothing"),
    "quality": (("auto", "standard"), "use steps"),
    "style": ((), "describe it in the prompt"),
    "moderation": (("auto", "low"), "nothing is moderated"),
}
_reader = BodyReader(ImagesBody, IMAGES_REFUSED, IMAGES_IGNORED)
_NAMES = {
    "width": "size",
    "height": "size",
    "picture": "size",
    "guidance": "guidance_scale",
    "true_cfg": "true_cfg_scale",
    "previews": "partial_images",
}
"""Fields of the body by the first word of the client's error, if the two differ."""


async def images(request: Request) -> Response | EventStream:
    """``POST /v1/images/generations``. Raises RouteNotFound if the model draws no pictures."""
    served = Served.of(request)
    model = await served.model()
    if not model.draws:
        raise RouteNotFound(f"{request.url.path}: this cluster serves no picture model")
    body, warnings = _reader.read(await read_body(request), strict=served.strict_parameters)
    await served.model(body.model)
    options = _options_of(body, request, model.pictures.side)
    if body.stream:
        events = _events(served, body, options, request, warnings)
        return await EventStream.begin(request.receive, events)
    pictures = await unless_gone(request.receive, _draw(served, body, options, request))
    content = await asyncio.to_thread(_content_of, pictures, body.response_format, warnings)
    return Response(content, media_type="application/json")


def _options_of(body: ImagesBody, request: Request, side: int) -> PictureOptions:
    width, height = _size_of(body.size, side)
    count = body.n or 1
    if count > 1 and count * width * height > MAX_ANSWER_PIXELS:
        raise ParameterError(
            f"n: {count} pictures of {width}x{height} have {count * width * height} pixels, "
            f"at most {MAX_ANSWER_PIXELS} are allowed in one answer",
            "n",
        )
    if body.stream and count > 1:
        raise ParameterError(f"n must be 1 with stream, not {count}", "n")
    if body.response_format == "url" and body.stream:
        raise ParameterError("response_format must be b64_json with stream", "response_format")
    if body.partial_images and not body.stream:
        raise ParameterError("partial_images needs stream: true", "partial_images")
    origin = origin_of(request)
    options = PictureOptions(
        width=width,
        height=height,
        steps=body.steps,
        guidance=body.guidance_scale,
        negative_prompt=body.negative_prompt,
        true_cfg=body.true_cfg_scale,
        target_endpoint=target_of(request).get("target_endpoint"),
        gateway=origin.get("gateway", ""),
    )
    if "traceparent" in origin:
        options["traceparent"] = origin["traceparent"]
    return options


def _size_of(size: str | None, side: int) -> tuple[int, int]:
    """Return width and height, by default ``side``, the model's own. Raises ParameterError."""
    if size in (None, "auto"):
        return side, side
    found = _SIZE.fullmatch(size or "")
    if found is None:
        raise ParameterError(
            f"size must be auto or WIDTHxHEIGHT, multiples of {PICTURE_MULTIPLE}, "
            f"not {str(size)[:40]!r}",
            "size",
        )
    return int(found[1]), int(found[2])


async def _draw(
    served: Served, body: ImagesBody, options: PictureOptions, request: Request
) -> Sequence[Picture]:
    """Draw all pictures of the body at a time. The first error cancels the others."""
    name, count = name_of("img", request), body.n or 1
    first = secrets.randbits(32) if body.seed is None else body.seed
    _check_seed(first)
    tasks = []
    for at in range(count):
        own = options.copy()
        own["seed"] = (first + at) & MAX_SEED
        own["request_id"] = f"{name}-{at}" if count > 1 else name
        if at:  # a full cluster refuses the first one; the others wait for room
            own["max_retries"] = BATCH_RETRIES
        tasks.append(asyncio.ensure_future(served.client.image(body.prompt, **own)))
    try:
        return await asyncio.gather(*tasks)
    except InputError as error:
        raise _named(error) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(
    served: Served,
    body: ImagesBody,
    options: PictureOptions,
    request: Request,
    warnings: Warnings,
) -> AsyncGenerator[bytes, None]:
    """Yield the previews, then the picture. Closing the iterator cancels the request."""
    seed = secrets.randbits(32) if body.seed is None else body.seed
    _check_seed(seed)
    own = options.copy()
    own["seed"], own["request_id"] = seed, name_of("img", request)
    arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
    if body.partial_images:
        own["previews"] = body.partial_images
    on_preview = (lambda png, *_: arrived.put_nowait(png)) if body.partial_images else None
    task = asyncio.ensure_future(served.client.image(body.prompt, on_preview=on_preview, **own))
    task.add_done_callback(lambda _: arrived.put_nowait(None))
    size, count = f"{options.get('width')}x{options.get('height')}", 0
    try:
        while (png := await arrived.get()) is not None:
            yield _event("partial_image", png, size, {"partial_image_index": count})
            count += 1
        picture = await task
        more = {"seed": picture.seed, "usage": _usage_of([picture])}
        yield _event("completed", picture.png, size, more | _shown(warnings))
    except InputError as error:
        raise _named(error) from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _event(kind: str, png: bytes, size: str, more: dict[str, Any]) -> bytes:
    name = f"image_generation.{kind}"
    content = {
        "type": name,
        "b64_json": base64.b64encode(png).decode(),
        "created_at": int(time.time()),
        "size": size,
        "quality": "auto",
        "background": "opaque",
        "output_format": "png",
        **more,
    }
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


def _check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise ParameterError(f"seed must be 0 to 2**64 - 1, not {str(seed)[:40]}", "seed")


def _named(error: InputError) -> InputError:
    """Return an error that names the field of the body."""
    word, _, rest = str(error).partition(" ")
    field = _NAMES.get(word, word)
    if type(error) is not InputError or field not in ImagesBody.__struct_fields__:
        return error
    return ParameterError(f"size: {error}" if field == "size" else f"{field} {rest}", field)


def _content_of(pictures: Sequence[Picture], form: str | None, warnings: Warnings) -> bytes:
    """Return the body of the answer, which takes a while: pictures have megabytes.

    ``form``: with ``url`` a picture is a data URL, because pictures are not stored.
    """
    name, before = ("url", "data:image/png;base64,") if form == "url" else ("b64_json", "")
    first = pictures[0]
    return msgspec.json.encode(
        {
            "created": int(time.time()),
            "data": [
                {name: before + base64.b64encode(one.png).decode(), "seed": one.seed}
                for one in pictures
            ],
            "background": "opaque",
            "output_format": "png",
            "size": f"{first.width}x{first.height}",
            "usage": _usage_of(pictures),
            **_shown(warnings),
        }
    )


def _shown(warnings: Warnings) -> dict[str, Any]:
    return {"warnings": warnings} if warnings else {}


def _usage_of(pictures: Sequence[Picture]) -> dict[str, Any]:
    inputs = pictures[0].prompt_tokens
    outputs = sum(one.tokens for one in pictures)
    return {
        "input_tokens": inputs,
        "input_tokens_details": {"text_tokens": inputs, "image_tokens": 0},
        "output_tokens": outputs,
        "total_tokens": inputs + outputs,
    }
