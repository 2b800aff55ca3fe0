"""Outputs of image requests."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from ..errors import ConfigError, InputError
from ..ids import RequestID
from .png import encode_png
from .status import GenerationStatus


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
