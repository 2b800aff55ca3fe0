"""Picture requests in two halves, as the two pools compute them.

:class:`PromptEncoder` is the prefill side: a request becomes named arrays, its whole state.
:class:`Denoiser` is the decode side: steps over batches of pictures, then pixels. A picture's bits
depend on its request and state alone, not on the batch or the step at which it was resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.pixels import PixelContext
from baton.proto.errors import InputError
from baton.proto.limits import MAX_PREVIEW_PIXELS
from baton.proto.picture_requests import check_picture, picture_seed, uses_negative

from ..kernels.backend import F32
from ..kernels.host_backend import PictureBackend
from ..kernels.parts import in_parts
from ..models.weights import Progress
from .captured import captured
from .configs import no_watch
from .family import EncodedPrompt, StepInputs
from .folder import PictureFolder
from .sampler import normals, reduced, sigmas_of, unpack_latents
from .vae import VaeDecoder

StateArrays = Mapping[str, F32]
"""``prompt`` ``[T, text_width]`` and, if the family has it, ``pooled`` ``[pooled_width]``; with a
negative prompt also ``negative_prompt`` and ``negative_pooled``."""

NOISE_STREAM = 0x4E4F4953
"""Philox stream of a picture's noise; sampled tokens use other streams."""

MAX_SAMPLES = 8
"""Samples of one call of the transformer, if no other number is chosen."""

MAX_TOKENS = 1 << 15
"""Tokens of all samples of one call, text and image; limits the memory of a step. One sample is
computed always: the largest has about half as many."""


class PromptEncoder:
    """The text encoders of a picture model. Not thread-safe."""

    def __init__(
        self, folder: PictureFolder, backend: PictureBackend, on_progress: Progress | None = None
    ) -> None:
        self._watch = no_watch
        backend = in_parts(backend, self._after_part)
        self._family = folder.family
        self.encoders = self._family.load_encoders(folder.part, backend, on_progress)
        self.encoders.watch(self._after_part)

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer, and after every part of a long one on the host.

        An exception of it ends the encoding.
        """
        self._watch = after_layer

    def encode(self, context: PixelContext) -> StateArrays:
        """Return the state that the denoising steps need. Raises InputError for a bad request."""
        check_picture(context)
        state: dict[str, F32] = {}
        for prefix in ("", "negative_") if uses_negative(context) else ("",):
            encoded = self.encode_part(context, prefix)
            state[f"{prefix}prompt"] = encoded.vectors
            if encoded.pooled is not None:
                state[f"{prefix}pooled"] = encoded.pooled
        return state

    def encode_part(self, context: PixelContext, prefix: str) -> EncodedPrompt:
        """Encode the prompt, or the one with the ``prefix``.

        Raises InputError for prompts that the encoders do not read.
        """
        self._family.check_request(context)
        return self.encoders.encode(context, prefix)

    def _after_part(self) -> None:
        self._watch()


@dataclass(slots=True, eq=False)
class Drawing:
    """A picture between its steps.

    ``state``: its arrays may be made when they are read. ``latents`` ``[tokens, channels]`` are
    those before step ``step``, on the device that computes; ``uploaded``: arrays of the state that
    are there too. ``sigmas`` ``[steps + 1]``. ``rows``, ``columns``: of latent tokens.
    ``texts``: vectors of the prompt ("") and of the negative prompt ("negative_"). ``noise``: that
    the last step found in the latents before it, if a step was computed here. ``has_left()``:
    whether nobody needs the picture any more; a call for such drawings alone ends early.
    """

    context: PixelContext
    state: StateArrays
    sigmas: F32
    latents: F32
    rows: int
    columns: int
    texts: dict[str, int]
    step: int = 0
    noise: F32 | None = None
    uploaded: dict[str, F32] = field(default_factory=dict)
    has_left: Callable[[], bool] = bool

    @property
    def is_done(self) -> bool:
        """Whether all steps are computed."""
        return self.step == len(self.sigmas) - 1

    @property
    def progress(self) -> float:
        """Fraction of the steps that are computed."""
        return self.step / (len(self.sigmas) - 1)


class LeftError(Exception):
    """All requests of a call have left."""


@dataclass(slots=True)
class _Sample:
    """One input of the transformer: a drawing with its prompt or its negative prompt."""

    drawing: Drawing
    prefix: str
    noise: F32 | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Samples of one shape are computed together: rows and columns, tokens of the prompt."""
        return self.drawing.rows, self.drawing.columns, self.drawing.texts[self.prefix]


class Denoiser:
    """Transformer and VAE of a picture model. Not thread-safe.

    ``max_samples``: samples that one call of the transformer computes. A picture with a negative
    prompt has two. ``memory``: bytes for the arrays of a call, 0 without a limit; see
    :mod:`.memory`.
    """

    def __init__(
        self,
        folder: PictureFolder,
        backend: PictureBackend,
        on_progress: Progress | None = None,
        *,
        max_samples: int = MAX_SAMPLES,
        memory: int = 0,
    ) -> None:
        self._watch = no_watch
        self._current: Sequence[Drawing] = ()  # whose pictures the running call computes
        backend = in_parts(backend, self.after_part)
        self._folder, self._max_samples, self._backend = folder, max_samples, backend
        self._family = family = folder.family
        self._max_tokens = min(MAX_TOKENS, memory // family.row_bytes if memory else MAX_TOKENS)
        self.transformer = family.load_transformer(folder.part, backend, on_progress)
        self._steps = captured(self.transformer, backend)
        self.vae = VaeDecoder(folder.part("vae"), folder.vae, backend, on_progress)
        self._steps.watch(self.after_part)
        self.vae.after_layer = self.after_part

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer, and after every part of a long one on the host.

        For a captured step it is called once the step is queued.

        An exception of it ends a step, and no drawing has changed then. :meth:`release` frees what
        the step has allocated.
        """
        self._watch = after_layer

    def after_part(self) -> None:
        """Call what watches this object. Raises LeftError if the call's requests have left."""
        self._watch()
        self.check_left()

    def check_left(self) -> None:
        """Raise LeftError if the requests of the running call have left."""
        if self._current and all(drawing.has_left() for drawing in self._current):
            raise LeftError

    @contextmanager
    def computing(self, drawings: Sequence[Drawing]) -> Iterator[None]:
        """Within the context, :meth:`after_part` ends a call once these drawings have left."""
        self._current = drawings
        try:
            yield
        finally:
            self._current = ()

    def release(self) -> None:
        """Free the arrays of a step that was ended, as large as gigabytes.

        A device may still compute the step, so it keeps them for the next one.
        """
        if self._backend.on_host:
            self._steps.release()
            self.vae.release()

    def start(
        self,
        context: PixelContext,
        state: StateArrays,
        *,
        step: int = 0,
        latents: F32 | None = None,
    ) -> Drawing:
        """Return the drawing of a request before its first step.

        ``step`` and ``latents`` ``[tokens, channels]`` resume it before a later step. Without
        latents the noise is the request's own, else a function of its seed; without a seed, of
        its id. Raises InputError for a request or state that does not fit the model.
        """
        check_picture(context)
        self._family.check_request(context)
        texts = self._check_state(context, state)
        unit = self._folder.pixels_per_token
        if context.height % unit or context.width % unit:
            raise InputError(f"height and width must be multiples of {unit} for this model")
        rows, columns = context.height // unit, context.width // unit
        for count in texts.values():
            self._family.check_size(count, rows, columns)
        steps, tokens = context.num_inference_steps, rows * columns
        sigmas = sigmas_of(steps, tokens, self._folder.scheduler)
        if not 0 <= step <= steps or (step > 0 and latents is None):
            raise InputError(f"a drawing of {steps} steps cannot be resumed at step {step}")
        if latents is None:
            latents = context.latents if context.latents.size else self._noise(context, tokens)
        channels = self._family.token_width
        if latents.shape != (tokens, channels) or latents.dtype.kind != "f":
            raise InputError(f"latents must be floats [{tokens}, {channels}], not {latents.shape}")
        own = self._backend.upload(latents.astype(np.float32))
        return Drawing(context, state, sigmas, own, rows, columns, texts, step)

    def step(self, batch: Sequence[Drawing]) -> None:
        """Compute the next step of every unfinished drawing.

        A drawing that is left out of later batches is aborted; nothing else refers to it. One that
        has left meanwhile may stay at its step.
        """
        active = [drawing for drawing in batch if not drawing.is_done]
        samples = [self._samples(drawing) for drawing in active]
        for group in self._groups([sample for both in samples for sample in both]):
            try:
                with self.computing([sample.drawing for sample in group]):
                    self._execute(group)
            except LeftError:
                self.release()
        for drawing, both in zip(active, samples, strict=True):
            found = [sample.noise for sample in both if sample.noise is not None]
            if len(found) < len(both):
                continue  # it has left
            noise = found[0]
            if len(found) == 2:  # away from the noise of the negative prompt
                guide = self._family.guidance
                noise = guide.combine(drawing.context, noise, found[1], self._backend)
            at = drawing.step
            change = drawing.sigmas[at + 1] - drawing.sigmas[at]
            drawing.latents = self._backend.mix(noise, None, drawing.latents, change)
            drawing.noise = noise
            drawing.step += 1

    def preview(self, drawing: Drawing) -> npt.NDArray[np.uint8]:
        """Return the pixels that the last step predicts, ``[height, width, 3]``.

        The noise of that step is taken out of the latents at once. A picture of more than
        :data:`~....proto.limits.MAX_PREVIEW_PIXELS` is reduced: each latent is then the mean of a
        square of latents, so that the VAE takes little time. The drawing does not change. Raises
        ValueError if no step was computed.
        """
        if drawing.noise is None:
            raise ValueError("no step was computed")
        noise = self._backend.download(drawing.noise)
        latents = self._backend.download(drawing.latents)
        clean = latents - drawing.sigmas[drawing.step] * noise
        latents = unpack_latents(clean, drawing.rows, drawing.columns)
        pixels, factor = drawing.context.height * drawing.context.width, 1
        while pixels > MAX_PREVIEW_PIXELS * factor**2:
            factor += 1
        return self._decoded(reduced(latents, min(factor, *latents.shape[:2])))

    def finish(self, drawing: Drawing) -> npt.NDArray[np.uint8]:
        """Return the pixels ``[height, width, 3]`` of a finished drawing; else ValueError."""
        if not drawing.is_done:
            raise ValueError(f"step {drawing.step} of {len(drawing.sigmas) - 1} is next")
        latents = self._backend.download(drawing.latents)
        return self._decoded(unpack_latents(latents, drawing.rows, drawing.columns))

    def is_finite(self, drawing: Drawing) -> bool:
        """True if no latent is infinite or NaN; waits until the steps are computed."""
        return self._backend.all_finite(drawing.latents)

    def _decoded(self, latents: F32) -> npt.NDArray[np.uint8]:
        self._steps.release()  # the VAE needs as much memory
        return self.vae.decode(np.ascontiguousarray(latents))

    def _noise(self, context: PixelContext, tokens: int) -> F32:
        seed = picture_seed(context)
        if seed is None:
            digest = blake2b(context.request_id.value.encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        channels = self._family.token_width
        return normals(seed, tokens * channels, NOISE_STREAM).reshape(tokens, channels)

    def _check_state(self, context: PixelContext, state: StateArrays) -> dict[str, int]:
        """Return the number of vectors of each prompt."""
        family = self._family
        widths = {"prompt": family.text_width}
        if family.pooled_width:
            widths["pooled"] = family.pooled_width
        if uses_negative(context):
            widths |= {f"negative_{name}": width for name, width in widths.items()}
        if state.keys() != widths.keys():
            raise InputError(f"the state has {sorted(state)}, not {sorted(widths)}")
        texts: dict[str, int] = {}
        for name, array in state.items():
            pooled, width = name.endswith("pooled"), widths[name]
            fits = array.ndim == (1 if pooled else 2) and array.size and array.shape[-1] == width
            if not fits or array.dtype != np.float32:
                raise InputError(f"{name} of the state is {array.dtype} of shape {array.shape}")
            if not pooled:
                texts[name.removesuffix("prompt")] = len(array)
        return texts

    def _groups(self, samples: Sequence[_Sample]) -> Iterator[list[_Sample]]:
        """Yield samples of one padded shape, as many together as the limits allow."""
        by_shape: dict[tuple[int, int, int], list[_Sample]] = {}
        for sample in samples:
            rows, columns, text = sample.shape
            by_shape.setdefault((rows, columns, self._padded(text)), []).append(sample)
        for (rows, columns, text), same in by_shape.items():
            together = self._max_tokens // (self._padded(rows * columns) + text)
            count = max(1, min(self._max_samples, together))
            for at in range(0, len(same), count):
                yield same[at : at + count]

    def _samples(self, drawing: Drawing) -> list[_Sample]:
        """Return the inputs of the next step: the prompt, and perhaps the negative prompt."""
        level = float(drawing.sigmas[drawing.step])
        prefixes = self._family.guidance.prefixes(drawing.context, level)
        return [_Sample(drawing, prefix) for prefix in prefixes]

    def _padded(self, count: int) -> int:
        return count + -count % self._family.row_multiple

    def _execute(self, group: list[_Sample]) -> None:
        self.check_left()
        drawings = [sample.drawing for sample in group]
        train = np.float32(self._folder.scheduler.num_train_timesteps)
        levels = np.array([d.sigmas[d.step] for d in drawings], np.float32)
        pooled = group if self._family.pooled_width else []
        noise = self._steps.execute(
            StepInputs(
                latents=[self._backend.activations(d.latents) for d in drawings],
                prompts=[self._text(s.drawing, f"{s.prefix}prompt") for s in group],
                pooled=[self._text(s.drawing, f"{s.prefix}pooled") for s in pooled],
                timesteps=levels * train,
                guidance=np.array([_guidance(d.context) for d in drawings], np.float32),
                rows=drawings[0].rows,
                columns=drawings[0].columns,
            )
        )
        for sample, part in zip(group, noise, strict=True):
            sample.noise = part

    def _text(self, drawing: Drawing, name: str) -> F32:
        """Return rows of the state as activations; they are copied to another device once."""
        if self._backend.on_host:
            found = drawing.state[name]
            return np.ascontiguousarray(found).reshape(-1, found.shape[-1])
        if name not in drawing.uploaded:
            found = drawing.state[name]
            drawing.uploaded[name] = self._backend.parameters(found.reshape(-1, found.shape[-1]))
        return drawing.uploaded[name]


def _guidance(context: PixelContext) -> float:
    given = context.guidance
    return context.guidance_scale if given is None else float(given.reshape(-1)[0])
