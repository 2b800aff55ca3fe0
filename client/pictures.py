"""Pictures from a cluster: the request for a prompt, its progress, and the finished picture.

The request's tokens count steps, and its end carries the PNG. A picture depends on its request
alone, so another worker that continues the request draws the same picture.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.pixels import PixelContext, decode_png, png_size
from baton.proto.contexts.tokens import TokenBuffer, wrap_tokens
from baton.proto.errors import InputError, InternalError, TaskMismatch
from baton.proto.limits import MAX_GUIDANCE, MAX_PICTURE_SIDE, MAX_PICTURE_STEPS, MAX_PREVIEWS
from baton.proto.picture_requests import PICTURE_MULTIPLE, check_picture
from baton.proto.requests import check_wire_context
from baton.proto.sampling import MAX_SEED
from baton.proto.value_checks import Check, real, shown, text, whole
from baton.proto.wire.context_maps import to_map
from baton.proto.wire.wire_context import WirePixelContext
from baton.text.prompt_tokens import MAX_PROMPT_CHARS, PromptTokens

from .events import Ended, NewTokens, RequestSpec
from .model import ServedModel, make_spec
from .options import RequestOptions, check_options

OnProgress = Callable[[int, int], object]
"""``on_progress(done, total)`` steps; first 0 done, when the prompt is encoded."""
OnPreview = Callable[[bytes, int, int], object]
"""``on_preview(png, done, total)``: the picture as the steps so far predict it."""
PREVIEWS = 3
"""Previews of a call with ``on_preview``, if no other number is chosen."""
_SEED_BITS = 32
_OPTIONS = frozenset(
    {
        "target_endpoint", "deadline", "pool", "pin", "fallback", "max_retries", "request_id",
        "cache_salt", "traceparent", "gateway",
    }
)  # fmt: skip


class PictureOptions(RequestOptions, total=False):
    """Keyword arguments of ``image``: the options of a request for text that fit, and these.

    None stands for the default of an option.

    ``negative_prompt``: what the picture must not show; every step then takes twice as long.
    ``width``, ``height``: pixels, multiples of 16 (the model's own size, such as 1024). ``steps``:
    of denoising, 1 to 250 (28 for Flux dev, 4 for Flux schnell, 8 for Z-Image-Turbo, 50 for
    Z-Image). ``guidance``: how closely
    the picture follows the prompt (3.5 for Flux dev, 0 for Z-Image-Turbo, 4 for Z-Image), not for
    Flux schnell; Z-Image computes every step twice if it is above 0. ``true_cfg``: how far the
    picture keeps away from the negative prompt, above 1 (4), only for Flux. ``cfg_normalization``:
    most norms of the noise that guidance may make (unlimited), ``cfg_truncation``: share of the
    time with guidance, 0 to 1 (1), both only for Z-Image. ``seed``: the same seed gives the same
    picture (random). ``previews``: how many previews ``on_preview`` gets, 0 to 16 (3).
    """

    negative_prompt: str | None
    width: int | None
    height: int | None
    steps: int | None
    guidance: float | None
    true_cfg: float | None
    cfg_normalization: float | None
    cfg_truncation: float | None
    seed: int | None
    previews: int | None


@dataclass(slots=True, frozen=True, kw_only=True)
class Picture:
    """A finished picture. ``png``: content of a PNG file, RGB with 8 bits per colour.

    ``width``, ``height``: pixels. ``seed``: draws the same picture again. ``prompt_tokens``: of the
    prompts, by the model's last tokenizer. ``prefill``, ``decode``: ids of the workers.
    """

    png: bytes = field(repr=False)
    width: int
    height: int
    seed: int
    steps: int
    request_id: str
    prompt_tokens: int = 0
    prefill: str = ""
    decode: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens that the picture has in the model, one per 16 x 16 pixels."""
        return self.width * self.height // PICTURE_MULTIPLE**2

    def save(self, path: str | Path) -> None:
        """Write the PNG file. Raises OSError if that fails."""
        Path(path).write_bytes(self.png)

    def pixels(self) -> npt.NDArray[np.uint8]:
        """Return the pixels, uint8 ``[height, width, 3]``."""
        return decode_png(self.png)


class PictureJob:
    """One call of ``image``: its request, and what arrived for it.

    ``model``: as the router describes it. ``settings``: see :class:`PictureOptions`. Raises
    TaskMismatch if the model draws no pictures, InputError for a wrong argument.
    """

    def __init__(
        self,
        model: ServedModel,
        prompt: str,
        settings: Mapping[str, Any],
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
    ) -> None:
        if not model.draws:
            raise TaskMismatch(
                f"{model.card.name!r} draws no pictures; image needs a picture model"
            )
        for name, given in (("on_progress", on_progress), ("on_preview", on_preview)):
            if given is not None and not callable(given):
                raise InputError(f"{name} must be a function, not {shown(given)}")
        options, own = _checked(settings)
        texts = [_prompt("prompt", prompt)]
        if model.pictures.defaults.true_cfg is None:
            _check_classic(model, own)
        else:
            _check_true_cfg(model, own)
        negative = own.get("negative_prompt")
        texts += [] if negative is None else [negative]
        if on_preview is not None:
            own.setdefault("previews", PREVIEWS)
        elif own.get("previews"):
            raise InputError("previews needs on_preview, a function that gets them")
        prompts = [model.pictures.tokenizer.encode(one) for one in texts]
        context = _context_of(model, prompts, own)
        context.target_endpoint = options.get("target_endpoint")
        context.cache_salt = options.get("cache_salt", "")
        wire = cast("WirePixelContext", to_map(context))
        check_wire_context(wire, model.card)
        self.spec: RequestSpec = make_spec(wire, options, options.get("request_id"))
        self._wire = wire
        self._prompt_tokens = sum(one.length for one in prompts)
        self._on_progress, self._on_preview = on_progress, on_preview
        self.picture: Picture | None = None

    def take(self, news: NewTokens | Ended) -> None:
        """Report progress, or store the picture. Raises the error of a failed request."""
        if isinstance(news, Ended):
            self._end(news)
            return
        done = news.position + len(news.tokens) - 1 - len(self._wire.tokens)
        total = self._wire.num_inference_steps
        if self._on_progress is not None:
            self._on_progress(done, total)
        if self._on_preview is not None and news.media is not None:
            self._on_preview(bytes(news.media), done, total)

    def _end(self, ended: Ended) -> None:
        if ended.error is not None:
            raise ended.error
        wire, png = self._wire, ended.media
        if png is None or png_size(png) != (wire.width, wire.height):
            raise InternalError(f"the router ended a request with {ended.status!r} and no picture")
        self.picture = Picture(
            png=bytes(png),
            width=wire.width,
            height=wire.height,
            seed=int(wire.extra_params["seed"][0]),
            steps=wire.num_inference_steps,
            request_id=ended.request_id,
            prompt_tokens=self._prompt_tokens,
            prefill=ended.prefill,
            decode=ended.decode,
        )


# --------------------------------------------------------------------------- arguments


def _side(name: str, value: Any) -> int:
    known = f"a multiple of {PICTURE_MULTIPLE}, {PICTURE_MULTIPLE} to {MAX_PICTURE_SIDE}"
    side: int = whole(PICTURE_MULTIPLE, MAX_PICTURE_SIDE, known)(name, value)
    if side % PICTURE_MULTIPLE:
        raise InputError(f"{name} must be {known}, not {shown(value)}")
    return side


def _prompt(name: str, value: Any) -> str:
    checked: str = text(1, MAX_PROMPT_CHARS)(name, value)
    if not checked.strip():
        raise InputError(f"{name} is empty")
    return checked


_CHECKS: dict[str, Check] = {
    "negative_prompt": text(0, MAX_PROMPT_CHARS),
    "width": _side,
    "height": _side,
    "steps": whole(1, MAX_PICTURE_STEPS, f"a whole number, 1 to {MAX_PICTURE_STEPS}"),
    "guidance": real(0, MAX_GUIDANCE, f"a number, 0 to {MAX_GUIDANCE:g}"),
    "true_cfg": real(0, MAX_GUIDANCE, f"a number, 0 to {MAX_GUIDANCE:g}"),
    "cfg_normalization": real(0, MAX_GUIDANCE, f"a number, 0 to {MAX_GUIDANCE:g}"),
    "cfg_truncation": real(0, 1, "a number, 0 to 1"),
    "seed": whole(0, MAX_SEED, "a whole number, 0 to 2**64 - 1"),
    "previews": whole(0, MAX_PREVIEWS, f"a whole number, 0 to {MAX_PREVIEWS}"),
}


def _checked(settings: Mapping[str, Any]) -> tuple[RequestOptions, dict[str, Any]]:
    """Return the options of the request, and the settings of the picture."""
    own = {name: value for name, value in settings.items() if name in _CHECKS}
    others = {name: value for name, value in settings.items() if name not in _CHECKS}
    known = _OPTIONS | _CHECKS.keys()
    options = check_options(others, known)
    return options, {
        name: _CHECKS[name](name, value) for name, value in own.items() if value is not None
    }


_CLASSIC = ("cfg_normalization", "cfg_truncation")
"""Settings of a model whose guidance is the weight of the negative prompt."""


def _check_true_cfg(model: ServedModel, own: Mapping[str, Any]) -> None:
    """Raise InputError for a setting without effect in a model with true CFG, such as Flux."""
    negative, true_cfg = own.get("negative_prompt"), own.get("true_cfg")
    if negative is None and true_cfg not in (None, 1):
        raise InputError("true_cfg needs a negative_prompt, which may be an empty text")
    if negative is not None and true_cfg is not None and true_cfg <= 1:
        raise InputError(f"true_cfg must be above 1 with a negative_prompt, not {true_cfg:g}")
    if own.get("guidance") and not model.pictures.defaults.takes_guidance:
        raise InputError(
            f"guidance has no effect: {model.card.name!r} was trained without it; leave it out"
        )
    for name in _CLASSIC:
        if name in own:
            raise InputError(f"{name} has no effect: {model.card.name!r} has true_cfg instead")


def _check_classic(model: ServedModel, own: dict[str, Any]) -> None:
    """Raise InputError for a setting without effect in a model with classic CFG, such as Z-Image.

    Guidance needs a negative prompt, which is empty by default.
    """
    guidance = own.get("guidance", model.pictures.defaults.guidance)
    if "true_cfg" in own:
        raise InputError(
            f"true_cfg has no effect: the negative prompt of {model.card.name!r} has the weight "
            "of guidance"
        )
    if guidance > 0:
        own.setdefault("negative_prompt", "")
        return
    for name in ("negative_prompt", *_CLASSIC):
        if name in own:
            raise InputError(f"{name} has no effect without guidance; set guidance above 0")


def _context_of(
    model: ServedModel, prompts: Sequence[PromptTokens], own: Mapping[str, Any]
) -> PixelContext:
    """Return the request. ``prompts``: the prompt, then the negative prompt, if there is one."""
    defaults = model.pictures.defaults
    first, second = _tokens(prompts[0])
    context = PixelContext(
        tokens=first,
        tokens_2=second,
        model_name=model.card.name,
        extra_params=_named(own),
        width=own.get("width", model.pictures.side),
        height=own.get("height", model.pictures.side),
        num_inference_steps=own.get("steps", defaults.steps),
        guidance_scale=own.get("guidance", defaults.guidance),
    )
    if len(prompts) > 1:
        context.negative_tokens, context.negative_tokens_2 = _tokens(prompts[1])
        context.true_cfg_scale = own.get("true_cfg", defaults.true_cfg or 1.0)
    check_picture(context)  # the area, which no single field exceeds
    return context


def _tokens(prompt: PromptTokens) -> tuple[TokenBuffer, TokenBuffer | None]:
    second = prompt.tokens_2
    return wrap_tokens(prompt.tokens), None if second is None else wrap_tokens(second)


def _named(own: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the settings that travel as named arrays."""
    seed = own.get("seed", secrets.randbits(_SEED_BITS))
    named: dict[str, npt.NDArray[Any]] = {"seed": np.array([seed], np.uint64)}
    if own.get("previews"):
        named["previews"] = np.array([own["previews"]], np.uint64)
    for name in _CLASSIC:
        if name in own:
            named[name] = np.array([own[name]], np.float64)
    return named
