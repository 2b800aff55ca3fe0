"""What an image request gives back."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from .errors import ConfigError, InputError
from .ids import RequestID
from .png import encode_png
from .status import GenerationStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputImageContent:
    """One image as base64 text, or where it is to be found.

    ``format``: ``png``, ``jpeg`` and so on, in small letters.
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
        """The image of uint8 ``[height, width]`` or ``[height, width, 1, 3 or 4 channels]``.

        ``detail``: how closely a reader should look, passed on. ValueError for other arrays
        and for what the format cannot hold. PNG needs nothing else; other formats need Pillow
        (``pip install pillow``), ConfigError without it.
        """
        png = encode_png(array)
        name = format.lower()
        data = png if name == "png" else _converted(png, name)
        return cls(image_data=base64.b64encode(data).decode(), format=name, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """Contents made for one request, and its status after them."""

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
