"""A decoder with a vision tower: images become rows of features in the place of embeddings."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.rope_positions import GRIDS, merged_grids
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.vision import TextAndVisionContext, context_grids, is_tiled, spans_of
from baton.proto.errors import BatonError, CheckpointError, HandoffFailed, InputError

from ..kernels.backend import Backend
from ..loading.checkpoint import Checkpoint
from ..loading.model_config import VisionLanguageConfig
from ..pipeline.model import FeatureRows, ModelInputs, ModelOutputs
from ..scheduling.plan import ChunkImage
from .decoder import Decoder
from .feature_cache import FeatureCache
from .rope import cos_sin_table
from .vision_tower import Encoded, VisionTower
from .weights import Progress, WeightLoader

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class VisionDecoder(Decoder):
    """A loaded model for text with images. Not thread-safe.

    ``vision``: False leaves the tower out, for a decode worker.
    """

    config: VisionLanguageConfig
    sees = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        max_length: int,
        on_progress: Progress | None = None,
        *,
        block_size: int = 16,
        head: bool = True,
        vision: bool = True,
    ) -> None:
        config = checkpoint.config
        if not isinstance(config, VisionLanguageConfig):
            raise CheckpointError(f"{checkpoint.folder}: config.json has no vision_config")
        self._vision = vision
        self._tower: VisionTower | None = None
        self.encoded = FeatureCache()
        super().__init__(
            checkpoint, backend, max_length, on_progress, block_size=block_size, head=head
        )
        self._angles = cos_sin_table(config.rope, config.head_dim, max_length)
        self._axes = np.array(config.rope_axes, np.int64)

    def _prefix(self, checkpoint: Checkpoint, *, head: bool) -> str:
        nested = "model.language_model."
        if f"{nested}embed_tokens.weight" in checkpoint.tensors:
            return nested
        return super()._prefix(checkpoint, head=head)

    def _load_more(self, loader: WeightLoader, checkpoint: Checkpoint) -> None:
        nested = "model.visual.patch_embed.proj.weight" in checkpoint.tensors
        prefix = "model.visual." if nested else "visual."
        config = checkpoint.config
        if self._vision and isinstance(config, VisionLanguageConfig):
            self._tower = VisionTower(config.vision, loader, loader.backend, prefix)
        else:
            loader.unused.append(prefix)

    # ------------------------------------------------------------------ requests

    def check(self, context: TextContext) -> None:
        """Raise InputError unless the images' tokens, grids and pixels fit the model."""
        if not isinstance(context, TextAndVisionContext):
            return
        if context.pixel_values:
            raise InputError("images need a range of tokens; pixel_values has none")
        if is_tiled(context):
            raise InputError(f"this model reads {GRIDS}, not aspect ratios")
        prompt = context.tokens.all[: context.prompt_length]
        holders = int(np.count_nonzero(prompt == self.config.image_token_id))
        spans = spans_of(context)
        filled = sum(end - start for start, end in spans)
        if holders != filled:
            raise InputError(f"{holders} image placeholder tokens, but the images have {filled}")
        if not spans:
            return
        grids = context_grids(context)
        merged = merged_grids(spans, grids)
        merge = self.config.vision.merge_size
        for image, (_, rows, columns), (height, width) in zip(
            context.images, np.asarray(grids).tolist(), merged, strict=True
        ):
            if (rows, columns) != (height * merge, width * merge):
                raise InputError(f"this model merges {merge} x {merge} patches of an image")
            why = self._unusable(image.pixel_values, (rows, columns))
            if why is not None:
                raise why

    def refusal(self, image: ChunkImage) -> BatonError | None:
        """Return why the image cannot be encoded here, or None."""
        if self._tower is None:
            return HandoffFailed("this worker has no vision tower to compute images again")
        merge = self.config.vision.merge_size
        if image.grid[0] % merge or image.grid[1] % merge:
            return InputError(f"this model merges {merge} x {merge} patches of an image")
        if image.first + image.count > image.grid[0] * image.grid[1] // merge**2:
            return InputError("an image has more tokens than its grid")
        return self._unusable(image.pixels, image.grid)

    def _unusable(
        self, pixels: npt.NDArray[np.generic], grid: tuple[int, int]
    ) -> BatonError | None:
        side = self.config.vision.patch_size
        expected = (grid[0] * side, grid[1] * side, 3)
        if not pixels.size:
            return HandoffFailed("the pixels of an image were dropped after its handoff")
        if pixels.dtype != np.uint8 or pixels.shape != expected:
            return InputError(
                f"pixels must be uint8 of shape {expected}, not {pixels.dtype} of {pixels.shape}"
            )
        return None

    # ------------------------------------------------------------------ the forward pass

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Return the logits of the wanted rows; encodes images that are not cached."""
        rope = model_inputs.rope_positions
        if rope is not None and rope.ndim == 2:
            angles = mixed_angles(self._angles, self._axes, rope)
            model_inputs = replace(
                model_inputs,
                cos_sin=self.backend.upload(angles),
                rope_positions=np.arange(len(angles), dtype=np.int32),
            )
        if model_inputs.images:
            model_inputs = replace(model_inputs, features=self._features(model_inputs))
        return super().execute(model_inputs)

    def _features(self, inputs: ModelInputs) -> tuple[FeatureRows, ...]:
        """Return the features of the step's images, from the cache or the tower."""
        found: dict[bytes, Encoded] = {}
        missing: dict[bytes, ChunkImage] = {}
        for image in inputs.images:
            features = self.encoded.get(image.key, image.grid)
            if features is None:
                missing[image.key] = image
            else:
                found[image.key] = features
        if missing:
            if self._tower is None:
                raise HandoffFailed("this worker has no vision tower")
            report, began = inputs.layer_done, time.perf_counter()
            encoded = self._tower.encode(
                [(_uint8(image), image.grid) for image in missing.values()],
                None if report is None else lambda: report(0),
            )
            self.backend.synchronize()  # a GPU's time for images is not a token's
            self.encode_seconds += time.perf_counter() - began
            for (key, image), features in zip(missing.items(), encoded, strict=True):
                found[key] = features
                self.encoded.put(key, image.grid, features)
        return tuple(self._rows(image, found[image.key]) for image in inputs.images)

    def _rows(self, image: ChunkImage, encoded: Encoded) -> FeatureRows:
        rows = np.arange(image.row, image.row + image.count, dtype=np.int32)
        part = slice(image.first, image.first + image.count)
        deep = tuple(features[part] for features in encoded.deep)
        return FeatureRows(self.backend.upload(rows), encoded.features[part], deep)


def mixed_angles(table: F32, axes: npt.NDArray[np.int64], positions: I32) -> F32:
    """Return the angles ``[T, D]`` of rows with three positions each.

    ``table``: ``[max_position, D]``. ``axes``: int64 ``[D / 2]``, which of the positions
    ``[3, T]`` turns each pair of channels.
    """
    pairs = np.arange(len(axes))
    where = positions[axes].T
    angles = np.empty((positions.shape[1], 2 * len(axes)), np.float32)
    angles[:, : len(axes)] = table[where, pairs]
    angles[:, len(axes) :] = table[where, len(axes) + pairs]
    return angles


def _uint8(image: ChunkImage) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(image.pixels).view(np.uint8)
