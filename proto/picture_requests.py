"""Checks of picture requests that clients, routers and workers share.

They read no model: what depends on a model (vocabulary, prompt length) its encoders check.

A worker runs a picture as a row of positions, like the tokens of a text (:func:`state_tokens`). The
row stands for the state of the picture, which is computed by the text encoders: each position holds
one vector, as a token holds keys and values. First come the vectors of the prompt, then those of a
negative prompt, each part padded to whole blocks, then one position that holds nothing. Generated
tokens follow, one per step.

A request for a model with two text encoders (Flux) has ``tokens`` and ``tokens_2``, one for a model
with a single text encoder (Z-Image) has ``tokens`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from .contexts.pixels import PixelContext
from .contexts.tokens import TokenBuffer
from .errors import InputError
from .layout import ModelCard
from .limits import (
    MAX_CONTROL_BYTES,
    MAX_GUIDANCE,
    MAX_LATENT,
    MAX_PICTURE_PIXELS,
    MAX_PICTURE_PROMPT_TOKENS,
    MAX_PICTURE_SIDE,
    MAX_PICTURE_STEPS,
    MAX_PREVIEWS,
)
from .wire.wire_context import WireContext, WirePixelContext, WireTokens

Int32 = npt.NDArray[np.int32]

FLUX, Z_IMAGE = "FluxPipeline", "ZImagePipeline"
"""Architectures of picture models."""
PICTURE_MULTIPLE = 16
"""Width and height are multiples of so many pixels."""
STATE_KEY_TOKENS = 8
"""Tokens at the start of a part of the state that identify its prompt; a worker's blocks have at
least as many positions, so the first block of a part names the whole prompt."""
STATE_VOCABULARY = 1 << 16
"""Values of a token in the row of a picture: 16 bits of the key each."""


def check_picture(request: PixelContext | WirePixelContext, *, committed: bool = False) -> None:
    """Raise InputError for the first fault of a picture request.

    ``committed``: ``tokens`` stand for the state of the picture, not for the prompt.
    """
    _check_size(request.height, request.width)
    steps = request.num_inference_steps
    _check_whole("num_inference_steps", steps, 1, MAX_PICTURE_STEPS)
    _check_scale("guidance_scale", request.guidance_scale)
    _check_scale("true_cfg_scale", request.true_cfg_scale)
    if request.num_images_per_prompt != 1:
        raise InputError(
            f"num_images_per_prompt is {request.num_images_per_prompt}, limit 1; "
            "send one request per picture, each with its own seed"
        )
    _check_prompts(request, _PROMPTS[1:] if committed else _PROMPTS)
    _check_arrays(request)
    picture_seed(request)
    preview_steps(request)
    cfg_normalization(request)
    cfg_truncation(request)


def check_picture_shape(wire: WirePixelContext, *, committed: bool = False) -> None:
    """Raise InputError for the first fault of a picture request on the wire.

    ``committed``: a request with its state, as a decode worker gets it. Its ``tokens`` are the row
    of the picture, and it has a :func:`base_length`.
    """
    check_picture(wire, committed=committed)
    if wire.task != "draw":
        raise InputError(f"a request for a picture cannot have the task {wire.task[:80]!r}")
    for name in _TEXT_FIELDS:
        if getattr(wire, name) != getattr(_PLAIN, name):
            raise InputError(f"{name} has no meaning in a request for a picture")
    if bool(base_length(wire)) != committed:
        raise InputError(f"extra_params has {BASE!r}, which workers set, and only in a Commit")


def check_prompts(request: PixelContext | WirePixelContext, architecture: str) -> None:
    """Raise InputError for prompts and scales that do not fit the architecture of a picture model.

    Z-Image has one text encoder, and ``guidance_scale`` is the weight of the negative prompt.
    """
    named = request.extra_params
    if architecture != Z_IMAGE:
        for prefix in _prefixes(request):
            for name in (f"{prefix}tokens", f"{prefix}tokens_2"):
                _prompt(request, name)
        for name in ("cfg_normalization", "cfg_truncation"):
            if name in named:
                raise InputError(f"{name} has no meaning for this model, which has true CFG")
        return
    for name in ("tokens_2", "negative_tokens_2"):
        if getattr(request, name) is not None:
            raise InputError(f"{name} has no meaning for this model, which has one text encoder")
    if request.true_cfg_scale != 1:
        raise InputError("true_cfg_scale has no meaning for this model; use guidance_scale")
    if request.guidance is not None:
        raise InputError("guidance has no meaning for this model; use guidance_scale")
    if request.guidance_scale > 0 and request.negative_tokens is None:
        raise InputError(
            "guidance_scale above 0 needs negative_tokens, which may be those of an empty prompt"
        )


def check_picture_room(wire: WirePixelContext, card: ModelCard) -> None:
    """Raise InputError if the state and the steps need more positions than the model serves."""
    check_prompts(wire, card.architecture)
    length = state_length(state_parts(wire, card.layout.block_size))
    needed = length + wire.num_inference_steps + 1
    if needed > card.max_length:
        raise InputError(
            f"the prompts and the steps of the picture need {needed} positions of KV memory, "
            f"limit {card.max_length}"
        )


def check_picture_area(wire: WirePixelContext, card: ModelCard) -> None:
    """Raise InputError if the picture needs more memory than the decode workers have for it."""
    pixels, limit = wire.height * wire.width, card.max_pixels
    if limit and pixels > limit:
        side = math.isqrt(limit) // PICTURE_MULTIPLE * PICTURE_MULTIPLE
        raise InputError(
            f"picture too large: {wire.height} x {wire.width} are {pixels} pixels, limit {limit} "
            f"by the memory of the decode workers, such as {side} x {side}"
        )


def picture_seed(request: PixelContext | WirePixelContext) -> int | None:
    """Return the seed of a request modulo 2**64, None if unset.

    The seed is ``extra_params["seed"]``, an integer array of one element.

    Raises InputError for another array.
    """
    seed = _number(request, "seed")
    return None if seed is None else seed % (1 << 64)


def base_length(request: PixelContext | WirePixelContext) -> int:
    """Return the length of the request's own ``tokens``, of which a Commit has the row instead.

    It is ``extra_params["base"]``, an integer array of one element; 0: ``tokens`` are the prompt.

    Raises InputError for another array or number.
    """
    base = _number(request, BASE)
    if base is not None and not 0 < base <= MAX_PICTURE_PROMPT_TOKENS:
        raise InputError(f"{BASE} is {base}, of a prompt of at most {MAX_PICTURE_PROMPT_TOKENS}")
    return base or 0


def preview_steps(request: PixelContext | WirePixelContext) -> frozenset[int]:
    """Return the numbers of done steps after which the request gets a preview.

    ``extra_params["previews"]``, an integer array of one element, is how many there are. They
    divide the steps evenly, without the last one; a picture of few steps has fewer previews.

    Raises InputError for another array, and for more than the limit.
    """
    count = _number(request, "previews") or 0
    if not 0 <= count <= MAX_PREVIEWS:
        raise InputError(f"previews must be 0 to {MAX_PREVIEWS}, not {count}")
    steps = request.num_inference_steps
    return frozenset(steps * n // (count + 1) for n in range(1, count + 1)) - {0}


def cfg_normalization(request: PixelContext | WirePixelContext) -> float:
    """Return how many norms of the prompt's noise the guided noise may have; 0: any number.

    ``extra_params["cfg_normalization"]``, an array of one number. Raises InputError for another
    array and for a negative number.
    """
    found = _real(request, "cfg_normalization", 0.0)
    if found < 0:
        raise InputError(f"cfg_normalization must be 0 or more, not {found:g}")
    return found


def cfg_truncation(request: PixelContext | WirePixelContext) -> float:
    """Return the share of the time, from noise (0) to picture (1), with a negative prompt.

    ``extra_params["cfg_truncation"]``, an array of one number. Raises InputError for another array
    and for a number that is not in 0..1.
    """
    found = _real(request, "cfg_truncation", 1.0)
    if not 0 <= found <= 1:
        raise InputError(f"cfg_truncation must be in 0..1, not {found:g}")
    return found


def _real(request: PixelContext | WirePixelContext, name: str, default: float) -> float:
    found = _single(request, name, "iuf", "number")
    if found is None:
        return default
    value = float(found)
    if not math.isfinite(value):
        raise InputError(f"{name} must be finite, not {value}")
    return value


def _number(request: PixelContext | WirePixelContext, name: str) -> int | None:
    found = _single(request, name, "iu", "integer")
    return None if found is None else int(found)


def _single(
    request: PixelContext | WirePixelContext, name: str, kinds: str, what: str
) -> np.generic | None:
    """Return the only element of an extra parameter, None without one. ``kinds``: its dtypes'."""
    found = request.extra_params.get(name)
    if found is None:
        return None
    if found.size != 1 or found.dtype.kind not in kinds:
        raise InputError(
            f"{name} must be an array of one {what}, not {found.dtype} of shape {found.shape}"
        )
    only: np.generic = found.reshape(-1)[0]
    return only


def _check_size(height: int, width: int) -> None:
    for name, side in (("height", height), ("width", width)):
        _check_whole(name, side, PICTURE_MULTIPLE, MAX_PICTURE_SIDE)
        if side % PICTURE_MULTIPLE:
            raise InputError(f"{name} must be a multiple of {PICTURE_MULTIPLE}, not {side}")
    if height * width > MAX_PICTURE_PIXELS:
        raise InputError(
            f"picture too large: {height} x {width} are {height * width} pixels, "
            f"limit {MAX_PICTURE_PIXELS}"
        )


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not least <= int(value) <= most:  # type: ignore[call-overload]
        raise InputError(f"{name} must be a whole number in {least}..{most}, not {value!r:.40}")


def _check_scale(name: str, value: object) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= MAX_GUIDANCE:  # type: ignore[arg-type,operator]
        raise InputError(f"{name} must be a number in 0..{MAX_GUIDANCE}, not {value!r:.40}")


BASE = "base"
_NAMED = (BASE, "seed", "previews", "cfg_normalization", "cfg_truncation")
_PROMPTS = ("tokens", "tokens_2", "negative_tokens", "negative_tokens_2")
_PLAIN = WireContext(tokens=WireTokens(np.empty(0, np.int32)), max_length=1)
_TEXT_FIELDS = (
    "sampling",
    "eos_token_ids",
    "eos_sequences",
    "log_probabilities",
    "log_probabilities_echo",
    "ignore_eos",
    "json_schema",
    "lora_name",
)
"""Fields of a text request that a picture request leaves alone."""


def _check_prompts(request: PixelContext | WirePixelContext, names: tuple[str, ...]) -> None:
    for name in names:
        buffer = getattr(request, name)
        if buffer is None:
            continue
        ids = _ids(buffer)
        if ids.ndim != 1 or ids.dtype not in (np.int32, np.int64) or not len(ids):
            raise InputError(f"{name} must be one-dimensional integers, at least one")
        if len(ids) > MAX_PICTURE_PROMPT_TOKENS:
            raise InputError(f"{name}: {len(ids)} tokens, limit {MAX_PICTURE_PROMPT_TOKENS}")


def _check_arrays(request: PixelContext | WirePixelContext) -> None:
    unknown = request.extra_params.keys() - _NAMED
    if unknown:
        raise InputError(
            f"extra_params has {min(unknown)[:40]!r}; only {', '.join(_NAMED[1:])} are supported"
        )
    if request.mask is not None and not request.mask.all():
        raise InputError("mask is not supported; the encoders read all tokens")
    for name in ("sigmas", "timesteps", "latent_image_ids"):
        array = getattr(request, name)
        if array is not None and array.size:
            raise InputError(f"{name} are computed by the model; leave them empty")
    guidance = request.guidance
    if guidance is not None:
        if guidance.size != 1 or guidance.dtype.kind not in "iuf":
            raise InputError("guidance must be an array of one number")
        _check_scale("guidance", float(guidance.reshape(-1)[0]))
    latents = request.latents
    if latents is not None and latents.size:
        pixels = request.height * request.width
        few = latents.size <= pixels and latents.nbytes <= MAX_CONTROL_BYTES
        if latents.dtype.kind != "f" or latents.ndim != 2 or not few:
            raise InputError("latents must be floats [tokens, channels]")
        if not (np.abs(latents) <= np.float64(MAX_LATENT)).all():  # nor is NaN
            raise InputError(f"latents must be finite numbers of at most {MAX_LATENT:g}")


def _ids(buffer: TokenBuffer | WireTokens) -> npt.NDArray[Any]:
    return buffer.array if isinstance(buffer, WireTokens) else buffer.all


# --------------------------------------------------------------------------- the row of a picture


@dataclass(slots=True, frozen=True)
class StatePart:
    """The vectors of one prompt in the row: positions ``[start, end)``, whole blocks.

    ``prefix``: "" or "negative_". ``texts``: vectors of the last text encoder, one per token. With
    two encoders the pooled vector of the first one follows; then comes padding.
    """

    prefix: str
    start: int
    texts: int
    end: int


@dataclass(slots=True, frozen=True, eq=False)
class Picture:
    """What the steps of a picture need besides its state; never modified.

    ``request``: without its prompt in a decode worker. ``parts``: of its row.
    """

    request: PixelContext
    parts: tuple[StatePart, ...]

    @property
    def length(self) -> int:
        """Positions of the row."""
        return state_length(self.parts)

    @property
    def encoder_tokens(self) -> int:
        """Tokens of all prompts that the last text encoder reads."""
        return sum(part.texts for part in self.parts)

    @property
    def step_rows(self) -> int:
        """Rows of a denoising step, in proportion to its work."""
        return rows_of(self.request, [part.texts for part in self.parts])


def uses_negative(request: PixelContext | WirePixelContext) -> bool:
    """Whether a negative prompt takes effect: the request has one, and CFG is on.

    Flux has true CFG, with a scale above 1. With a single text encoder CFG is on if the guidance
    scale is above 0.
    """
    if request.negative_tokens is None and request.negative_tokens_2 is None:
        return False
    return request.true_cfg_scale > 1 if _has_two(request) else request.guidance_scale > 0


def step_rows(request: PixelContext | WirePixelContext) -> int:
    """Return the rows of a denoising step, in proportion to its work; see :func:`rows_of`.

    A missing prompt has no rows.
    """
    return rows_of(request, _text_lengths(request))


def encoder_tokens(request: PixelContext | WirePixelContext) -> int:
    """Return the tokens of all prompts that the last text encoder reads.

    They measure the work of prefill: if there is another encoder, it has a fortieth of the last
    one's weights (CLIP and T5 of Flux).
    """
    return sum(_text_lengths(request))


def _text_lengths(request: PixelContext | WirePixelContext) -> list[int]:
    """Return the length of each prompt for the last encoder; 0 for one that is missing."""
    name = "tokens_2" if _has_two(request) else "tokens"
    texts = (getattr(request, f"{prefix}{name}") for prefix in _prefixes(request))
    return [0 if text is None else len(text) for text in texts]


def rows_of(request: PixelContext | WirePixelContext, texts: Sequence[int]) -> int:
    """Return the rows of a denoising step with prompts of so many tokens.

    A row is a token of a prompt, or 16 x 16 pixels. With CFG both prompts have their rows.
    """
    squares = max(1, request.height * request.width >> 8)
    return sum(squares + count for count in texts)


def state_parts(request: PixelContext | WirePixelContext, block_size: int) -> tuple[StatePart, ...]:
    """Return the parts of a picture's row. Raises InputError if a prompt is missing."""
    parts: list[StatePart] = []
    start, two = 0, _has_two(request)
    for prefix in _prefixes(request):
        texts = len(_prompt(request, f"{prefix}tokens"))
        if two:
            texts = len(_prompt(request, f"{prefix}tokens_2"))
        elif not prefix and (base := base_length(request)):
            texts = base  # the request's own tokens gave way to the row
        end = start + -(-max(texts + two, STATE_KEY_TOKENS) // block_size) * block_size
        parts.append(StatePart(prefix, start, texts, end))
        start = end
    return tuple(parts)


def _has_two(request: PixelContext | WirePixelContext) -> bool:
    """Whether the request is for a model with two text encoders."""
    return request.tokens_2 is not None or request.negative_tokens_2 is not None


def _prefixes(request: PixelContext | WirePixelContext) -> tuple[str, ...]:
    """Return the prefixes of the prompts that take effect."""
    return ("", "negative_") if uses_negative(request) else ("",)


def state_length(parts: tuple[StatePart, ...]) -> int:
    """Return the positions of a picture's row.

    The last one holds nothing: a prefix found in the cache never includes the last position, so it
    can include all blocks of the state.
    """
    return parts[-1].end + 1


def longest_row(block_size: int, texts: int = MAX_PICTURE_PROMPT_TOKENS) -> int:
    """Return the most positions of a picture, with its steps.

    ``texts``: tokens of a prompt and of a negative prompt.
    """
    part = -(-(texts + 1) // block_size) * block_size
    return 2 * part + 1 + MAX_PICTURE_STEPS + 1


def state_tokens(request: PixelContext | WirePixelContext, block_size: int) -> Int32:
    """Return a picture's row as tokens, int32 ``[state_length]``.

    Each part begins with a key of its prompt: the first blocks of two rows are equal if, and only
    if, the prompts are. Keys of later blocks depend on it, because hashes of blocks are chained.
    Raises InputError if a prompt is missing.
    """
    parts = state_parts(request, block_size)
    row = np.zeros(state_length(parts), np.int32)
    for part in parts:
        row[part.start : part.start + STATE_KEY_TOKENS] = _prompt_key(request, part.prefix)
    return row


def _prompt_key(request: PixelContext | WirePixelContext, prefix: str) -> npt.NDArray[np.uint16]:
    digest = blake2b(digest_size=2 * STATE_KEY_TOKENS, person=b"baton-picture")
    names = (f"{prefix}tokens", f"{prefix}tokens_2")
    for name in names if _has_two(request) else names[:1]:
        ids = _prompt(request, name).astype("<i8")
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.tobytes())
    return np.frombuffer(digest.digest(), "<u2")


def _prompt(request: PixelContext | WirePixelContext, name: str) -> npt.NDArray[Any]:
    buffer = getattr(request, name)
    if buffer is None:
        raise InputError(f"{name} are missing; this model reads a prompt with two text encoders")
    return _ids(buffer)
