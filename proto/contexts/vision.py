"""A text request with images. Each image has a range of placeholder tokens.

Invariant: no step begins or ends inside an image, because a vision encoder needs whole images. The
images that are not encoded yet follow from the number of processed tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy.typing as npt
from msgspec import Meta

from ..compat.old_names import takes_earlier_fields
from ..errors import InputError
from ..hashing import ImageSpan, block_hashes
from ..limits import MAX_IMAGES, MAX_NAMED_ARRAYS, MAX_VISION_TOKEN_IDS
from .images import ImageMetadata
from .outputs import LogProbabilities, TokenLogProbs
from .rope_positions import DELTA, GRIDS, Span, merged_grids, rope_delta
from .text import TextContext
from .tiled_images import IDS, MASK, SeenImages, canvases_of, check_row

Pixels = npt.NDArray[Any]


@takes_earlier_fields
@dataclass(slots=True, kw_only=True, eq=False)
class TextAndVisionContext(TextContext):
    """One text request with images.

    ``vision_token_ids``: ids of placeholder tokens for images (a model may have several).
    ``images``: sorted, with at least one token between two images. ``extra_model_args``: other
    arrays for the model. ``pixel_values``: one image without a token range, the form of earlier
    models. Raises ValueError if images and tokens contradict each other.
    """

    vision_token_ids: Annotated[list[int], Meta(max_length=MAX_VISION_TOKEN_IDS)] = field(
        default_factory=list
    )
    images: Annotated[list[ImageMetadata], Meta(max_length=MAX_IMAGES)] = field(
        default_factory=list
    )
    extra_model_args: Annotated[dict[str, Pixels], Meta(max_length=MAX_NAMED_ARRAYS)] = field(
        default_factory=dict
    )
    pixel_values: Annotated[tuple[Pixels, ...], Meta(max_length=1)] = ()
    _pixels_encoded: bool = False
    type: str = field(default="TextAndVisionContext", init=False, repr=False)

    def __post_init__(self) -> None:
        TextContext.__post_init__(self)  # the class cell of a slotted dataclass is another
        self.pixel_values = tuple(self.pixel_values)
        if len(self.pixel_values) > 1:
            raise InputError(f"pixel_values can hold only one image, not {len(self.pixel_values)}")
        self._check_images()
        self._check_position(self.tokens.current_position, "current_position")

    def _check_images(self) -> None:
        starts = [image.start_idx for image in self.images]
        if starts != sorted(starts):
            raise InputError("Images must be sorted")
        for one, two in zip(self.images, self.images[1:], strict=False):
            if two.start_idx <= one.end_idx:
                raise InputError("Images must be non-overlapping")
        if self.images and self.images[-1].end_idx > len(self.tokens):
            raise InputError("Images must be before the end of the token array")
        for image in self.images:
            ends = (self.tokens[image.start_idx], self.tokens[image.end_idx - 1])
            if any(token not in self.vision_token_ids for token in ends):
                raise InputError(
                    f"Images must be filled with <vision_token_id> ({self.vision_token_ids})"
                )

    def _check_position(self, position: int, name: str) -> None:
        for image in self.images:
            if image.start_idx < position < image.end_idx:
                raise InputError(
                    f"It is invalid for the {name} ({position}) to bisect an image ({image})"
                )

    # ------------------------------------------------------------------ images to encode

    @property
    def image_idx(self) -> int:
        """Index of the first image that is not fully processed; the number of images if none."""
        processed = self.tokens.processed_length
        for index, image in enumerate(self.images):
            if processed < image.end_idx:
                return index
        return len(self.images)

    @property
    def next_images(self) -> list[ImageMetadata]:
        """The images that are not fully processed."""
        return self.images[self.image_idx :]

    @property
    def needs_vision_encoding(self) -> bool:
        """Whether an image waits for the vision encoder.

        Computed, so it is True again after a reset. ``pixel_values`` wait until the first step.
        Setting the property affects only ``pixel_values``.
        """
        waiting = bool(self.pixel_values) and not self._pixels_encoded
        return waiting or self.image_idx < len(self.images)

    @needs_vision_encoding.setter
    def needs_vision_encoding(self, value: bool) -> None:
        self._pixels_encoded = not value

    # ------------------------------------------------------------------ growth

    def update(
        self, new_token: int, log_probabilities: LogProbabilities | TokenLogProbs | None = None
    ) -> None:
        """See :meth:`.TextContext.update`; ValueError if the next step would cut an image."""
        self._check_step()
        TextContext.update(self, new_token, log_probabilities)
        self._pixels_encoded = True

    def jump_ahead(self, new_token: int) -> None:
        """See :meth:`.TextContext.jump_ahead`."""
        self._check_step()
        TextContext.jump_ahead(self, new_token)
        self._pixels_encoded = True

    def reset(self) -> None:
        """See :meth:`.TextContext.reset`; all images will be encoded again."""
        TextContext.reset(self)
        self._pixels_encoded = False

    def rollback(self, idx: int) -> None:
        """See :meth:`.TextContext.rollback`; an image that would be cut is processed again."""
        TextContext.rollback(self, idx)
        start = self.tokens.processed_length
        self.tokens.rewind_processing(start - self.compute_image_aligned_idx(start))

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
        committed_idx: int | None = None,
    ) -> None:
        """See :meth:`.OldNames.set_token_indices`; neither end of a step may cut an image."""
        if start_idx is not None:
            self._check_position(start_idx, "start_idx")
        if active_idx is not None:
            self._check_position(active_idx, "current_position")
        TextContext.set_token_indices(self, start_idx, active_idx, end_idx, committed_idx)

    def _check_step(self) -> None:
        """Raise ValueError, before any change, if the next step would begin inside an image."""
        if self.tokens.is_chunked:
            self._check_position(self.tokens._end, "current_position")

    # ------------------------------------------------------------------ chunks and prefix keys

    def compute_image_aligned_idx(self, idx: int) -> int:
        """Return ``idx``, or the start of the image that contains ``idx``."""
        for image in self.images:
            if image.start_idx <= idx < image.end_idx:
                return image.start_idx
        return idx

    def chunk_at_image(self, n: int) -> int:
        """Leave at most ``n`` active tokens for the next step, without cutting an image.

        An image at the start of the step is taken whole, even if it is longer than ``n``. Returns
        the number of active tokens. Raises ValueError for ``n`` below 1.
        """
        if n < 1:
            raise ValueError(f"a chunk needs at least one token, not {n}")
        tokens = self.tokens
        start = tokens.processed_length + tokens._offset
        end = self.compute_image_aligned_idx(start + n)
        if end <= start:
            end = next(image.end_idx for image in self.images if image.end_idx > start)
        if end - start < tokens.active_length:
            tokens.chunk(end - start)
        return tokens.active_length

    def image_spans(self, start: int = 0) -> list[ImageSpan]:
        """Return the spans of the images for block hashes of the tokens from ``start`` on."""
        return [
            (image.start_idx - start, image.end_idx - start, image.key())
            for image in self.images
            if image.end_idx > start
        ]

    def prefix_keys(self, block_size: int, salt: bytes) -> list[bytes]:
        """Return the cache keys of the full blocks of all tokens.

        Equal placeholder tokens with different pixels have different keys. ``pixel_values``, which
        have no range, count from the first block on.
        """
        if self.pixel_values:
            whole = ImageMetadata(start_idx=0, end_idx=1, pixel_values=self.pixel_values[0])
            spans: Sequence[ImageSpan] = [(0, 1, whole.key()), *self.image_spans()]
        else:
            spans = self.image_spans()
        return block_hashes(self.tokens.all, block_size, salt, images=spans)


def spans_of(context: TextAndVisionContext) -> list[Span]:
    """Return the placeholder tokens of the context's images."""
    return [(image.start_idx, image.end_idx) for image in context.images]


def is_tiled(context: TextAndVisionContext) -> bool:
    """True if the context's images are read by cross-attention."""
    return IDS in context.extra_model_args


def seen_images(context: TextAndVisionContext) -> SeenImages:
    """Return the images of a context with at least one. Raises InputError for contradictions."""
    named = context.extra_model_args
    if MASK not in named:
        raise InputError(f"{MASK} is missing in extra_model_args")
    canvases = canvases_of(named[IDS], named[MASK], len(context.images))
    prompt = context.tokens.all[: context.prompt_length]
    spans = [(image.start_idx, image.end_idx) for image in context.images]
    places = check_row(prompt, spans, named[IDS][0].tolist(), context.vision_token_ids[0])
    return SeenImages(
        end=spans[-1][1],
        ranges=tuple((start - 1, end) for start, end in spans),
        canvases=tuple(canvases),
        places=tuple(places),
    )


def context_rope_delta(context: TextAndVisionContext) -> int:
    """Return the rope delta of a context: from its arguments, or computed from its grids.

    Raises InputError if images have no grid, or if the delta is not an integer.
    """
    sent = context.extra_model_args.get(DELTA)
    if sent is not None:
        if sent.shape != (1,) or sent.dtype.kind not in "iu" or not -len(context.tokens) <= sent[0]:
            raise InputError(f"{DELTA} must be one integer, not {sent.dtype} of {sent.shape}")
        if sent[0] > 0:
            raise InputError(f"{DELTA} {sent[0]} must not be positive")
        return int(sent[0])
    if not context.images:
        return 0
    if is_tiled(context):
        return -context.images[-1].end_idx  # the text begins after the last image, at 0
    spans = spans_of(context)
    return rope_delta(spans, merged_grids(spans, context_grids(context)))


def context_grids(context: TextAndVisionContext) -> npt.ArrayLike:
    """Return the grids of the context's images. Raises InputError if it has none."""
    grids = context.extra_model_args.get(GRIDS)
    if grids is None:
        raise InputError(f"{GRIDS} is missing in extra_model_args")
    return grids
