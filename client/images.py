"""Images of prompts: found in messages, prepared, and put in place of the prompt's placeholders.

A prompt has one placeholder token per image. Each becomes as many as the image has tokens. For a
model that reads images in cross-attention layers, it stays as it is, and the images' tokens precede
the prompt.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.images.processor import Image, ImageProcessor, PreparedImage
from baton.images.tiles import TileSettings
from baton.proto.contexts.rope_positions import GRIDS
from baton.proto.contexts.tiled_images import aspect_ratios, image_row, ratio_args
from baton.proto.errors import CheckpointError, InputError
from baton.proto.layout import ModelCard
from baton.proto.limits import MAX_PIXEL_BYTES, MAX_REQUEST_IMAGES
from baton.proto.vision_requests import with_images
from baton.proto.wire.wire_context import WireContext, WireImage

Int32 = npt.NDArray[np.int32]
Message = Mapping[str, Any]
_KINDS = ("image", "image_url", "input_image")


@dataclass(slots=True, frozen=True, eq=False)
class PlacedImages:
    """The images of one prompt.

    ``tokens``: the prompt with the images' tokens, int32 ``[n]``. ``images``: with ranges in it.
    ``named``: shapes of the images, for ``extra_model_args``. ``placeholder``: id of the token.
    """

    tokens: Int32
    images: list[WireImage]
    named: dict[str, Int32]
    placeholder: int

    def added_to(self, wire: WireContext) -> WireContext:
        """Return the request with these images."""
        return with_images(wire, self.images, self.named, self.placeholder)


class ModelImages:
    """The preparation of images for one model, whose settings are read at the first use.

    ``files``: the model's text files. ``origin``: names them in errors. ``card``: of the model.
    """

    def __init__(self, files: Mapping[str, bytes], origin: str, card: ModelCard) -> None:
        self._files, self._origin, self._card = files, origin, card
        self._processor: ImageProcessor | None = None
        self._lock = threading.Lock()  # several requests may be prepared at a time

    def place(self, tokens: Int32, images: Sequence[Image], placeholder: int) -> PlacedImages:
        """Prepare images and expand a prompt's placeholders. Raises InputError.

        Raises CheckpointError if the model has no settings for images.
        """
        with self._lock:
            if self._processor is None:
                self._processor = ImageProcessor.from_files(self._files, self._origin)
        return place_images(tokens, images, self._processor, placeholder, self._card)

    def close(self) -> None:
        """Stop the process that decodes images, if it runs."""
        if self._processor is not None:
            self._processor.close()


@cache
def image_threads() -> ThreadPoolExecutor:
    """Return separate threads for images, so that texts need not wait for large images."""
    return ThreadPoolExecutor(2, thread_name_prefix="images")


def is_image_part(part: object) -> bool:
    """Return True for a part of a message's content that stands for an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def split_messages(
    messages: Sequence[Message], images: Sequence[Image]
) -> tuple[Sequence[Message], list[Image]]:
    """Return messages for a chat template, and the images in the order of their parts.

    A part with the type "image" or "image_url" may contain its image; others take the next of
    ``images``. If no message has such a part, ``images`` precede the text of the last message of
    the user. Raises InputError if the numbers of parts and images differ.
    """
    if not _has_parts(messages):
        return (_attached(messages, len(images)) if images else messages), list(images)
    left = list(images)
    found: list[Image] = []
    plain = [_plain_message(message, left, found) for message in messages]
    if left:
        raise InputError(
            f"{len(images)} images, but only {len(images) - len(left)} parts of messages for them"
        )
    return plain, found


def _has_parts(messages: object) -> bool:
    if not isinstance(messages, Sequence):
        return False  # the template reports it
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    return any(
        is_image_part(part)
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
    )


def _plain_message(message: Message, left: list[Image], found: list[Image]) -> Message:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts: list[Any] = []
    for part in content:
        if is_image_part(part):
            given = _image_of(part)
            if given is None:
                if not left:
                    raise InputError("more parts of type image in messages than images")
                given = left.pop(0)
            found.append(given)
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def _image_of(part: Mapping[str, Any]) -> Image | None:
    """Return the image in a part, or None. Raises InputError for an address on the network."""
    value = part.get(part["type"]) if part["type"] != "input_image" else part.get("image_url")
    value = value.get("url") if isinstance(value, Mapping) else value
    if value is None:
        value = part.get("url")
    if not isinstance(value, str) or (part["type"] == "image" and _is_path(value)):
        return value
    return data_url_content(value)


def _is_path(text: str) -> bool:
    return not text.startswith(("data:", "http:", "https:"))


def data_url_content(url: str) -> bytes:
    """Return the bytes of an image in a ``data:`` URL with base64. Raises InputError.

    The content decides the format: clients often name another type of image in the URL.
    """
    head, comma, body = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise InputError(
            "the url of an image must be data:image/TYPE;base64,...; fetch other addresses yourself"
        )
    if not head.endswith(";base64"):
        raise InputError("the data URL of an image must be base64")
    kind = head.removeprefix("data:").partition(";")[0].lower()
    if kind and not kind.startswith("image/"):
        raise InputError(f"the data URL of an image must have a type image/..., not {kind[:80]!r}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the data URL of an image is not base64: {error}") from None


def _attached(messages: Sequence[Message], count: int) -> Sequence[Message]:
    """Put parts for images before the text of the last message of the user."""
    for at in range(len(messages) - 1, -1, -1):
        message = messages[at]
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(parts, list | tuple):
                break
            changed = {**message, "content": [{"type": "image"}] * count + list(parts)}
            return [*messages[:at], changed, *messages[at + 1 :]]
    raise InputError("images need a message of the user")


# --------------------------------------------------------------------------- placeholders


def place_images(
    tokens: Int32,
    images: Sequence[Image],
    processor: ImageProcessor,
    placeholder: int,
    card: ModelCard,
) -> PlacedImages:
    """Prepare images and put their tokens into the prompt; InputError if the numbers differ."""
    places = np.flatnonzero(tokens == placeholder)
    if len(places) != len(images):
        raise InputError(
            f"the prompt has {len(places)} placeholders for {len(images)} images; each image needs "
            "one (in a chat, a part of type image)"
        )
    if len(images) > MAX_REQUEST_IMAGES:
        raise InputError(f"{len(images)} images, at most {MAX_REQUEST_IMAGES} are allowed")
    prepared = _prepare(images, processor)
    settings = processor.settings
    if isinstance(settings, TileSettings) != bool(card.image_positions):
        raise CheckpointError(f"the image settings of {card.name!r} are those of another model")
    if isinstance(settings, TileSettings):
        return _placed_before(tokens, prepared, settings.max_tiles, placeholder, card)
    counts = np.ones(len(tokens), np.int64)
    counts[places] = [one.tokens for one in prepared]
    ends = np.cumsum(counts)[places].tolist()
    spans = [
        WireImage(end - one.tokens, end, one.pixels, one.content_hash)
        for one, end in zip(prepared, ends, strict=True)
    ]
    for at, (one, two) in enumerate(pairwise(spans)):
        if one.end_idx == two.start_idx:
            raise InputError(f"no token is between the placeholders of images {at} and {at + 1}")
    grids = np.array([one.grid for one in prepared], np.int32).reshape(-1, 3)
    return PlacedImages(np.repeat(tokens, counts), spans, {GRIDS: grids}, placeholder)


def _placed_before(
    tokens: Int32, prepared: list[PreparedImage], max_tiles: int, placeholder: int, card: ModelCard
) -> PlacedImages:
    """Put the images' tokens before the prompt, for a model with cross-attention layers."""
    ratios = aspect_ratios(max_tiles)
    ids = [ratios.index(one.grid[1:]) + 1 for one in prepared]
    row, ranges = image_row(ids, card.image_positions, card.layout.block_size, placeholder)
    spans = [
        WireImage(start, end, one.pixels, one.content_hash)
        for one, (start, end) in zip(prepared, ranges, strict=True)
    ]
    whole = np.concatenate([row, tokens]).astype(np.int32)
    return PlacedImages(whole, spans, ratio_args(ids, max_tiles), placeholder)


def _prepare(images: Sequence[Image], processor: ImageProcessor) -> list[PreparedImage]:
    prepared: list[PreparedImage] = []
    total = 0
    for at, image in enumerate(images):
        try:
            one = processor.process(image)
        except InputError as error:
            raise InputError(f"images[{at}]: {error}" if len(images) > 1 else str(error)) from None
        total += one.pixels.nbytes
        if total > MAX_PIXEL_BYTES:
            raise InputError(
                f"the images have more than {MAX_PIXEL_BYTES} bytes of pixels after resizing"
            )
        prepared.append(one)
    return prepared
