"""A request for an image: latents are refined in steps from text tokens, and become an image.

The image is encoded as PNG with zlib alone.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..errors import ConfigError, InputError
from ..ids import RequestID
from ..limits import MAX_NAMED_ARRAYS, MAX_PICTURE_PIXELS
from .equality import same_fields
from .status import GenerationStatus
from .tokens import TokenBuffer, wrap_tokens

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def _no_floats() -> Floats:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputImageContent:
    """One image as base64 text, or its URL.

    ``format``: ``png``, ``jpeg`` and so on, in lower case.
    """

    image_data: str | None = None
    image_url: str | None = None
    format: str | None = None
    detail: str | None = None
    type: str = "output_image"

    def __post_init__(self) -> None:
        if self.type != "output_image":
            raise ValueError(f"the type of an output image is not {self.type[:40]!r}")

    @classmethod
    def from_numpy(
        cls,
        array: npt.NDArray[Any],
        format: str = "png",  # noqa: A002
        detail: str | None = None,
    ) -> OutputImageContent:
        """Encode uint8 ``[height, width]`` or ``[height, width, 1, 3 or 4 channels]``.

        ``detail``: level of detail for a reader, passed through. Raises ValueError for other
        arrays and for images that the format cannot hold. Formats other than PNG need Pillow
        (``pip install pillow``); raises ConfigError without it.
        """
        png = encode_png(array)
        name = format.lower()
        data = png if name == "png" else _converted(png, name)
        return cls(image_data=base64.b64encode(data).decode(), format=name, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """Generated contents of one request, and its status after them."""

    request_id: RequestID
    final_status: GenerationStatus
    output: list[OutputImageContent] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether these are the request's last contents."""
        return self.final_status.is_done


@dataclass(slots=True, kw_only=True, eq=False)
class PixelContext:
    """One image request.

    ``tokens``, ``tokens_2``: the prompt for the first and the second text encoder;
    ``negative_*``: prompts for content that the image must not show. ``mask``: of ``tokens``.
    ``latents``: refined by the steps; at the end pixels, ``[height, width]`` or ``[height, width,
    channels]``, uint8 or floats from 0 to 1. ``height``, ``width``: pixels.
    """

    tokens: TokenBuffer
    request_id: RequestID = field(default_factory=RequestID)
    model_name: str = ""
    mask: Array | None = None
    tokens_2: TokenBuffer | None = None
    negative_tokens: TokenBuffer | None = None
    negative_tokens_2: TokenBuffer | None = None
    extra_params: Annotated[dict[str, Array], Meta(max_length=MAX_NAMED_ARRAYS)] = field(
        default_factory=dict
    )
    timesteps: Array = field(default_factory=_no_floats)
    sigmas: Array = field(default_factory=_no_floats)
    latents: Array = field(default_factory=_no_floats)
    latent_image_ids: Array = field(default_factory=_no_floats)
    height: int = 1024
    width: int = 1024
    num_inference_steps: int = 50
    guidance_scale: float = 3.5
    guidance: Array | None = None
    true_cfg_scale: float = 1.0
    num_warmup_steps: int = 0
    num_images_per_prompt: int = 1
    target_endpoint: str | None = None
    cache_salt: str = ""
    status: GenerationStatus = GenerationStatus.ACTIVE
    type: str = field(default="PixelContext", init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, TokenBuffer):
            self.tokens = wrap_tokens(self.tokens)
        if isinstance(self.request_id, str):
            self.request_id = RequestID(self.request_id)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other) if isinstance(other, PixelContext) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    @property
    def is_done(self) -> bool:
        """Whether generation has ended."""
        return self.status.is_done

    def compute_num_available_steps(self, max_seq_len: int) -> int:
        """Return the number of inference steps; the sequence length has no effect."""
        return self.num_inference_steps

    def reset(self) -> None:
        """Make the request active again; latents are kept."""
        self.status = GenerationStatus.ACTIVE

    def update(self, latents: Array) -> None:
        """Set the latents after a step."""
        self.latents = latents

    def update_status(self, status: GenerationStatus) -> None:
        """Set the status."""
        self.status = status

    def to_generation_output(self) -> GenerationOutput:
        """Return the latents as one PNG; ValueError while the latents are not pixels."""
        return GenerationOutput(
            request_id=self.request_id,
            final_status=self.status,
            output=[OutputImageContent.from_numpy(_pixels(self.latents), format="png")],
        )


def _pixels(latents: Array) -> npt.NDArray[np.uint8]:
    """Convert latents to 8-bit pixels; InputError for floats outside 0 to 1: not decoded yet."""
    if latents.dtype.kind != "f":
        return latents
    if not np.all((latents >= 0) & (latents <= 1)):
        raise InputError("latents must be decoded to pixels, floats from 0 to 1 or uint8, first")
    return np.rint(latents.astype(np.float32) * 255).astype(np.uint8)


def _converted(png: bytes, wanted: str) -> bytes:
    try:
        from PIL import Image  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(f"images as {wanted[:40]!r} need Pillow: pip install pillow") from None
    out = io.BytesIO()
    try:
        Image.open(io.BytesIO(png)).save(out, format=wanted)
    except (KeyError, OSError) as error:
        raise InputError(f"the image cannot be written as {wanted[:40]!r}: {error}") from None
    return out.getvalue()


def png_bytes(height: int, width: int, channels: int = 3) -> int:
    """Return the largest size of an encoded image, in bytes: that of incompressible pixels."""
    raw = height * (1 + width * channels)
    return raw + (raw >> 8) + 1024  # stored blocks of zlib add less than a 256th


_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER = struct.Struct(">IIBBBBB")
_MOST_PIXELS = 4 * MAX_PICTURE_PIXELS
_SUB = 1
"""The filter of every row: a byte is the difference to the pixel before, modulo 256. On a smooth
picture this takes a third off the bytes, and more off the time of the compression."""
_LEVEL = 3
"""Compression: level 6 takes twice the time and saves 2 % of the bytes."""
PNG_PART = 1 << 20
"""Bytes that :func:`encode_png` compresses at once."""
_COLOURS = {1: 0, 3: 2, 4: 6}  # channels: grey, RGB, RGB and alpha


def encode_png(
    pixels: npt.NDArray[np.uint8], after_part: Callable[[], object] | None = None
) -> bytes:
    """Encode uint8 ``[height, width]`` or ``[height, width, 1, 3 or 4]``; else ValueError.

    ``after_part()`` is called after every :data:`PNG_PART` bytes; an exception of it ends the call.
    """
    if pixels.ndim not in (2, 3):
        raise ValueError(
            f"Expected 2D or 3D array [height, width(, channels)], not shape {pixels.shape}"
        )
    height, width = pixels.shape[:2]
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if channels not in _COLOURS:
        raise ValueError(f"Unsupported number of channels: {channels}, an image has 1, 3 or 4")
    if pixels.dtype != np.uint8:
        raise ValueError(f"pixels must be uint8, not {pixels.dtype}")
    if not height or not width:
        raise ValueError(f"an image of shape {pixels.shape} has no pixels")
    samples = pixels.reshape(height, -1)
    rows = np.empty((height, 1 + width * channels), np.uint8)
    rows[:, 0] = _SUB
    rows[:, 1 : 1 + channels] = samples[:, :channels]
    np.subtract(samples[:, channels:], samples[:, :-channels], out=rows[:, 1 + channels :])
    header = _PNG_HEADER.pack(width, height, 8, _COLOURS[channels], 0, 0, 0)
    return (
        _PNG_SIGNATURE
        + _png_chunk(b"IHDR", header)
        + _png_chunk(b"IDAT", _compressed(rows.reshape(-1), after_part))
        + _png_chunk(b"IEND", b"")
    )


def _compressed(data: npt.NDArray[np.uint8], after_part: Callable[[], object] | None) -> bytes:
    packer, found = zlib.compressobj(_LEVEL), []
    for start in range(0, len(data), PNG_PART):
        if start and after_part is not None:
            after_part()
        found.append(packer.compress(data[start : start + PNG_PART].data))
    found.append(packer.flush())
    return b"".join(found)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_size(png: bytes) -> tuple[int, int] | None:
    """Return width and height as a PNG file's header has them, None for another file."""
    if len(png) < 33 or png[:8] != _PNG_SIGNATURE or png[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", png, 16)
    return width, height


def decode_png(png: bytes) -> npt.NDArray[np.uint8]:
    """Decode a file of :func:`encode_png`: uint8 ``[height, width, channels]``, grey 2-D.

    Raises ValueError for other files, also for PNG files with other filters or another depth.
    """
    size = png_size(png)
    if size is None:
        raise ValueError("this is no PNG file")
    width, height = size
    _, _, *kind = _PNG_HEADER.unpack_from(png, 16)
    channels = {colour: count for count, colour in _COLOURS.items()}.get(kind[1], 0)
    if kind != [8, kind[1], 0, 0, 0] or not channels or not 0 < width * height <= _MOST_PIXELS:
        raise ValueError("this kind of PNG file is not read; use Pillow")
    row = 1 + width * channels
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(_data_of(png), height * row)
    except zlib.error as error:
        raise ValueError(f"the PNG file is broken: {error}") from None
    if len(raw) != height * row:
        raise ValueError("the PNG file is broken: it has not all pixels")
    rows = np.frombuffer(raw, np.uint8).reshape(height, row)
    if (rows[:, 0] != _SUB).any():
        raise ValueError("PNG files with other filters are not read; use Pillow")
    differences = rows[:, 1:].reshape(height, width, channels)
    pixels = np.cumsum(differences, axis=1, dtype=np.uint8)
    return pixels[:, :, 0] if channels == 1 else pixels


def _data_of(png: bytes) -> bytes:
    """Return the joined IDAT chunks, whose checksums are right. Raises ValueError."""
    parts: list[bytes] = []
    at = len(_PNG_SIGNATURE)
    while at + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, at)
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        if png[at + 8 + length : at + 12 + length] != struct.pack(">I", zlib.crc32(name + data)):
            raise ValueError("the PNG file is broken: a checksum is wrong")
        if name == b"IDAT":
            parts.append(data)
        if name == b"IEND":
            return b"".join(parts)
        at += 12 + length
    raise ValueError("the PNG file is broken: it has no end")
