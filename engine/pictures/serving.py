"""Runs the plans of a scheduler for pictures: the pipelines of the prefill and decode workers.

The state of a picture lies in the blocks of the pool as a row of vectors
(:mod:`....proto.picture_requests`): a block holds as many vectors as it has positions. The prefill
pipeline writes a row in one step. The decode pipeline computes one denoising step per row, and in
the last one also the pixels and their PNG.

An error of a request fails this request alone; an error of a step fails all its requests.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np

from baton.proto.contexts.pixels import PixelContext, encode_png
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import BatonError, InputError, InternalError
from baton.proto.limits import MAX_CHUNK_BYTES
from baton.proto.picture_requests import (
    PICTURE_MULTIPLE,
    Picture,
    StatePart,
    preview_steps,
    state_parts,
)
from baton.proto.sampling import SamplingParams

from ..kernels.backend import F32, I32
from ..pipeline.model import KVManager
from ..pipeline.steps import describe
from ..scheduling.plan import (
    Applied,
    Chunk,
    OnLayers,
    Sampled,
    SampleSpec,
    StepPlan,
    StepResult,
    Unwanted,
    abandoned_step,
)
from .family import EncodedPrompt
from .pipeline import Denoiser, Drawing, LeftError, PromptEncoder

Failures = dict[bytes, BatonError]
_LEFT = "the request has left"


class _Abandoned(Exception):
    """No request needs the running step any more."""


class PicturePipeline(ABC):
    """What both halves share: the pool, the run of a plan, and its end before the last layer.

    ``pooled``: length of the pooled vector; 0 for a model with a single text encoder.
    """

    def __init__(self, kv: KVManager, pooled: int) -> None:
        self.kv, self.pool = kv, kv.pool
        self.layers_done = 0  # and parts of long layers; other threads may read it
        self._pooled = pooled
        self._unwanted: Unwanted | None = None

    def execute(
        self,
        plan: StepPlan,
        on_layers: OnLayers | None = None,
        unwanted: Unwanted | None = None,
        applied: Applied | None = None,
    ) -> StepResult:
        """Run a plan. Once ``unwanted()`` returns True, it ends after the current layer.

        On the host it ends within a layer that takes long. So does the work for a request that has
        left, if no other one needs it; the step then continues with the others.
        ``on_layers`` is not called: a row is complete at the end of its step. Nor is ``applied``:
        no step is planned ahead.
        """
        began = time.perf_counter()
        failed: Failures = {}
        self._unwanted = unwanted
        try:
            self._check_wanted()
            sampled = self._run([c for c in plan.chunks if self._fits(c, failed)], failed)
        except _Abandoned:
            self._release()
            return abandoned_step(plan, time.perf_counter() - began)
        seconds = time.perf_counter() - began
        left = any(chunk.has_left is not None and chunk.has_left() for chunk in plan.chunks)
        return StepResult(
            plan.step, tuple(sampled), seconds, plan.num_tokens, failed, abandoned=left
        )

    @abstractmethod
    def _run(self, chunks: list[Chunk], failed: Failures) -> list[Sampled]:
        """Compute the step; requests without a token go to ``failed``."""

    @abstractmethod
    def trials(self) -> list[Chunk]:
        """Return chunks that compute little, for the first steps of a worker."""

    @abstractmethod
    def _release(self) -> None:
        """Free the memory of a step that was abandoned."""

    def clear(self, block: int) -> None:
        """Zero a block of the pool; no request may hold it."""
        self.pool[:, block] = 0

    def _after_layer(self) -> None:
        self.layers_done += 1
        self._check_wanted()

    def _check_wanted(self) -> None:
        if self._unwanted is not None and self._unwanted():
            raise _Abandoned

    def _fits(self, chunk: Chunk, failed: Failures) -> bool:
        """Whether the chunk is of a picture, and its row is in its blocks."""
        picture, size = chunk.picture, self.kv.layout.block_size
        if picture is None or len(chunk.block_table) * size < picture.length:
            failed[chunk.request] = InternalError("a chunk without a picture or without its blocks")
            return False
        return True

    def _least_picture(self, side: int) -> Picture:
        """Return a picture of one step and one token per prompt."""
        one = np.zeros(1, np.int64)
        request = PixelContext(
            tokens=TokenBuffer(one),
            tokens_2=TokenBuffer(one) if self._pooled else None,
            height=side,
            width=side,
            num_inference_steps=1,
            guidance_scale=0.0,
        )
        return Picture(request, state_parts(request, self.kv.layout.block_size))

    def _vectors(self) -> F32:
        """Return the pool as vectors, ``[blocks, block_size, size of a vector]``, a view."""
        layout = self.kv.layout
        vectors: F32 = self.pool[0].reshape(-1, layout.block_size, 2 * layout.head_dim)
        return vectors


class EncodingPipeline(PicturePipeline):
    """The prefill side: prompts become rows in the pool. For one thread."""

    def __init__(self, encoder: PromptEncoder, kv: KVManager, pooled: int) -> None:
        super().__init__(kv, pooled)
        self._encoder = encoder
        encoder.watch(self._after_layer)

    def _run(self, chunks: list[Chunk], failed: Failures) -> list[Sampled]:
        sampled = []
        for chunk in chunks:
            try:
                self._encode(chunk)
            except _Abandoned:
                raise
            except InputError as error:
                failed[chunk.request] = error
            except Exception as error:  # whatever the error, the loop must continue
                failed[chunk.request] = InternalError(f"encoding: {describe(error)}")
            else:
                sampled.append(Sampled(chunk.request, 0))
        return sampled

    def _encode(self, chunk: Chunk) -> None:
        """Write the row from the chunk's start on; a prefix hit ends at the start of a block.

        A part of which only some blocks were found is computed again as a whole, but the found
        blocks are not written, because others may read them.
        """
        picture, size, vectors = chunk.picture, self.kv.layout.block_size, self._vectors()
        if picture is None:
            return
        for part in picture.parts:
            first = max(part.start, chunk.start)
            if first >= part.end:
                continue
            encoded = self._encoder.encode_part(picture.request, part.prefix)
            row = np.zeros((part.end - part.start, vectors.shape[2]), np.float32)
            self._fill(row, part, encoded)
            blocks = chunk.block_table[first // size : part.end // size]
            vectors[blocks] = row[first - part.start :].reshape(len(blocks), size, -1)
        # The last position holds nothing, but its block is sent: not with an earlier row.
        vectors[chunk.block_table[picture.length // size]] = 0

    def _fill(self, row: F32, part: StatePart, encoded: EncodedPrompt) -> None:
        """Write a prompt's vectors, and its pooled vector after them, if there is one."""
        vectors, pooled = encoded.vectors, encoded.pooled
        size = 0 if pooled is None else len(pooled)
        if vectors.shape != (part.texts, row.shape[1]) or size != self._pooled:
            raise InternalError(f"encoders returned {vectors.shape}, and {size} pooled numbers")
        row[: part.texts] = vectors
        if pooled is not None:
            row[part.texts, :size] = pooled

    def _release(self) -> None:
        """Keep the encoders' arrays: the next prompt needs them."""

    def trials(self) -> list[Chunk]:
        """Return the shortest prompt, twice."""
        picture = self._least_picture(PICTURE_MULTIPLE)
        return 2 * [_chunk(picture, 0, picture.length)]


class PictureState(Mapping[str, F32]):
    """The state of a picture in the pool; an array is copied from there when it is read.

    ``vectors``: the pool, ``[blocks, block_size, size of a vector]``. ``table``: blocks of the row.
    """

    def __init__(self, vectors: F32, table: I32, picture: Picture, pooled: int) -> None:
        self._vectors, self._table, self._pooled = vectors, table, pooled
        self._parts = {part.prefix: part for part in picture.parts}

    def __getitem__(self, name: str) -> F32:
        prefix, size = name.removesuffix("prompt").removesuffix("pooled"), self._vectors.shape[1]
        part = self._parts[prefix]
        if name.endswith("pooled"):
            at = part.start + part.texts
            found: F32 = self._vectors[self._table[at // size], at % size, : self._pooled].copy()
            return found
        blocks = self._vectors[self._table[part.start // size : part.end // size]]
        rows: F32 = blocks.reshape(-1, blocks.shape[2])[: part.texts]
        return rows

    def __iter__(self) -> Iterator[str]:
        kinds = ("prompt", "pooled") if self._pooled else ("prompt",)
        return (f"{prefix}{kind}" for prefix in self._parts for kind in kinds)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class DrawingPipeline(PicturePipeline):
    """The decode side: denoising steps, then pixels. For one thread.

    Latents are kept between the steps of a request. A request that is in no later plan has ended,
    and its latents are dropped with that plan.
    """

    def __init__(self, denoiser: Denoiser, kv: KVManager, pooled: int, unit: int) -> None:
        """``unit``: pixels per latent token in each direction."""
        super().__init__(kv, pooled)
        self._denoiser, self._unit = denoiser, unit
        self._drawings: dict[bytes, Drawing] = {}
        denoiser.watch(self._after_layer)

    def _run(self, chunks: list[Chunk], failed: Failures) -> list[Sampled]:
        before, self._drawings = self._drawings, {}
        for chunk in chunks:
            try:
                self._drawings[chunk.request] = self._drawing(chunk, before.get(chunk.request))
            except InputError as error:
                failed[chunk.request] = error
            except InternalError as error:
                failed[chunk.request] = error
        try:
            self._denoiser.step(list(self._drawings.values()))
        except _Abandoned:
            raise
        except Exception as error:  # whatever the error, the loop must continue
            why = InternalError(f"denoising step: {describe(error)}")
            failed.update(dict.fromkeys(self._drawings, why))
            self._drawings = {}
        return self._finish(failed)

    def _drawing(self, chunk: Chunk, drawing: Drawing | None) -> Drawing:
        """Return the drawing of a request before the step of the chunk.

        The steps before it are computed again if this pipeline has not computed them.
        """
        picture = chunk.picture
        if picture is None or chunk.start < picture.length:
            raise InternalError("the state of a picture is computed by prefill workers alone")
        step = chunk.start - picture.length
        state = PictureState(self._vectors(), chunk.block_table, picture, self._pooled)
        if drawing is None or drawing.step > step:
            drawing = self._denoiser.start(picture.request, state)
        drawing.state = state
        if chunk.has_left is not None:
            drawing.has_left = chunk.has_left
        if step >= len(drawing.sigmas) - 1:
            raise InternalError(f"step {step + 1} of {len(drawing.sigmas) - 1}")
        while drawing.step < step:
            self._denoiser.step([drawing])
            if drawing.has_left():
                raise InternalError(_LEFT)
        return drawing

    def _finish(self, failed: Failures) -> list[Sampled]:
        """Return the tokens of the step: each is the number of steps that are done."""
        sampled = []
        for request, drawing in list(self._drawings.items()):
            try:
                with self._denoiser.computing([drawing]):
                    png = self._result_of(drawing)
            except _Abandoned:
                raise
            except LeftError:
                self._denoiser.release()
                failed[request] = InternalError(_LEFT)
                del self._drawings[request]
                continue
            except Exception as error:  # whatever the error, the loop must continue
                why = error if isinstance(error, BatonError) else InternalError(describe(error))
                failed[request] = why
                del self._drawings[request]
                continue
            sampled.append(Sampled(request, drawing.step, result=png))
            if drawing.is_done:
                del self._drawings[request]
        return sampled

    def _result_of(self, drawing: Drawing) -> bytes | None:
        """Return the finished picture, a preview if the request has one after this step, or None.

        A step that is computed again for a request that was resumed here has no preview. Raises
        LeftError if the request has left, and InternalError if the latents are not finite.
        """
        denoiser = self._denoiser
        denoiser.check_left()
        if not denoiser.is_finite(drawing):
            raise InternalError("the model produced numbers that are not finite")
        if drawing.is_done:
            return encode_png(denoiser.finish(drawing), denoiser.after_part)
        if drawing.step not in preview_steps(drawing.context):
            return None
        png = encode_png(denoiser.preview(drawing), denoiser.after_part)
        return png if len(png) <= MAX_CHUNK_BYTES else None

    def _release(self) -> None:
        self._drawings = {}
        self._denoiser.release()

    def trials(self) -> list[Chunk]:
        """Return the only step of the smallest picture, twice."""
        picture = self._least_picture(max(PICTURE_MULTIPLE, self._unit))
        return 2 * [_chunk(picture, picture.length, 1)]


def _chunk(picture: Picture, start: int, count: int) -> Chunk:
    """Return a chunk of ``count`` tokens in the first blocks of an unused pool."""
    table = np.arange(2, dtype=np.int32)
    spec = SampleSpec(SamplingParams(temperature=0), start + count, table[:0], picture.length)
    tokens = np.zeros(count, np.int32)
    return Chunk(b"warm-up", start, tokens, table, spec, picture=picture)
