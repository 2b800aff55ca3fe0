"""A request for an image: latents are refined in steps from text tokens, and become an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..errors import InputError
from ..ids import RequestID
from ..limits import MAX_NAMED_ARRAYS
from .equality import same_fields
from .image_output import GenerationOutput, OutputImageContent
from .status import GenerationStatus
from .text import wrap_tokens
from .tokens import TokenBuffer

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def _no_floats() -> Floats:
    return np.zeros(0, np.float32)


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
