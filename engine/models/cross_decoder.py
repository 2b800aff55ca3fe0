"""A decoder that reads images in cross-attention layers (mllama).

An image is read once: every cross-attention layer keeps its keys and values of all vision tokens.
They are stored in the KV memory of positions before the text (:mod:`.cross_views`), so they are
handed over, cached and verified as other KV blocks are. Rows of the text attend to the positions of
the text in layers with self-attention, and to the images that they see in the others. A prompt
without images leaves the cross-attention layers out.

It runs on the host: it scales and scatters arrays there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.proto.contexts.text import TextContext
from baton.proto.contexts.tiled_images import IDS, MASK, block_count
from baton.proto.contexts.vision import TextAndVisionContext, is_tiled, seen_images
from baton.proto.errors import BatonError, CheckpointError, ConfigError, HandoffFailed, InputError

from ..kernels.backend import Backend, PackedLinear
from ..loading.checkpoint import Checkpoint
from ..loading.model_config import CrossConfig
from ..loading.tiled_config import EXTRA_TOKENS
from ..pipeline.model import ModelInputs, ModelOutputs, narrowed, uploaded
from ..scheduling.plan import ChunkImage
from .cross_views import CrossShape, CrossView, cross_view, image_slots, text_rows
from .decoder import Decoder
from .feature_cache import FeatureCache
from .tiled_tower import TiledTower
from .vision_tower import Encoded
from .weights import Progress, WeightLoader

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

NO_LOGIT = -1e30
"""The logit of tokens that the head has no row for."""


@dataclass(slots=True, frozen=True)
class CrossLayer:
    """Weights of a cross-attention layer. ``kv``: None in a decode worker, which encodes no image.

    ``number``: among the cross-attention layers. The gates scale what attention and MLP add.
    ``halves``: attention's weights are bfloat16.
    """

    number: int
    input_norm: F32
    q: PackedLinear
    kv: PackedLinear | None
    q_norm: F32
    k_norm: F32
    o: PackedLinear
    post_norm: F32
    gate_up: PackedLinear
    down: PackedLinear
    attention_gate: np.float32
    mlp_gate: np.float32
    halves: bool


class CrossDecoder(Decoder):
    """A loaded model for text with images that cross-attention reads. Not thread-safe.

    ``vision``: False leaves out the tower, for a decode worker. Raises ConfigError for a backend on
    a device.
    """

    config: CrossConfig
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
        if not isinstance(config, CrossConfig):
            raise CheckpointError(f"{checkpoint.folder}: config.json has no cross-attention layers")
        if not backend.on_host:
            raise ConfigError(f"{checkpoint.folder}: {config.architecture} runs on the CPU only")
        self._vision = vision
        self._tower: TiledTower | None = None
        self._cross: dict[int, list[CrossLayer]] = {}  # by the layer before them
        self.encoded = FeatureCache()
        tokens = config.vision
        self._shape = CrossShape(
            config.tokens_per_position, tokens.tile_tokens, tokens.image_tokens
        )
        super().__init__(
            checkpoint, backend, max_length, on_progress, block_size=block_size, head=head
        )

    # ------------------------------------------------------------------ loading

    def _prefix(self, checkpoint: Checkpoint, *, head: bool) -> str:
        nested = "language_model.model."
        if f"{nested}embed_tokens.weight" in checkpoint.tensors:
            return nested
        return "model.language_model."

    def _places(self) -> tuple[int, ...]:
        return self.config.self_layers

    def _load_head(self, loader: WeightLoader, prefix: str) -> PackedLinear:
        """Load the head. Special tokens after the vocabulary get a logit that is never sampled."""
        name = "language_model.lm_head" if prefix.startswith("language_model") else "lm_head"
        extra, hidden = EXTRA_TOKENS, self.config.hidden_size
        known = self.vocab_size - extra
        weights = loader.take(f"{name}.weight", (known, hidden))
        bias = np.zeros(self.vocab_size, np.float32)
        bias[known:] = NO_LOGIT
        zeros = np.zeros((extra, hidden), weights.dtype)
        head = loader.backend.pack_linear([weights, zeros], bias)
        loader.packed_bytes += head.nbytes
        return head

    def _load_more(self, loader: WeightLoader, checkpoint: Checkpoint) -> None:
        config = self.config
        base = self._prefix(checkpoint, head=True)
        for number, place in enumerate(config.cross_layers):
            before = sum(layer < place for layer in config.self_layers) - 1
            layer = self._load_cross(loader, f"{base}layers.{place}", number)
            self._cross.setdefault(before, []).append(layer)
        outer = "" if base.startswith("language_model") else "model."
        names = f"{outer}vision_model.", f"{outer}multi_modal_projector."
        if self._vision:
            self._tower = TiledTower(config.vision, loader, *names, config.hidden_size)
        else:
            loader.unused.extend(names)

    def _load_cross(self, loader: WeightLoader, base: str, number: int) -> CrossLayer:
        config = self.config
        hidden, dim, wide = config.hidden_size, config.head_dim, config.intermediate_size
        queries, keys = config.num_heads * dim, config.num_kv_heads * dim
        attention, mlp = f"{base}.cross_attn", f"{base}.mlp"
        q = [(f"{attention}.q_proj", queries)]
        kv = [(f"{attention}.k_proj", keys), (f"{attention}.v_proj", keys)]
        gate_up = [(f"{mlp}.gate_proj", wide), (f"{mlp}.up_proj", wide)]
        if not self._vision:
            loader.unused.extend(f"{name}." for name, _ in kv)
        return CrossLayer(
            number=number,
            input_norm=loader.norm(f"{base}.input_layernorm.weight", hidden),
            q=loader.linear(q, hidden, bias=False),
            kv=loader.linear(kv, hidden, bias=False) if self._vision else None,
            q_norm=loader.norm(f"{attention}.q_norm.weight", dim),
            k_norm=loader.norm(f"{attention}.k_norm.weight", dim),
            o=loader.linear([(f"{attention}.o_proj", hidden)], queries, bias=False),
            post_norm=loader.norm(f"{base}.post_attention_layernorm.weight", hidden),
            gate_up=loader.linear(gate_up, hidden, bias=False),
            down=loader.linear([(f"{mlp}.down_proj", hidden)], wide, bias=False),
            attention_gate=gate(loader, f"{base}.cross_attn_attn_gate"),
            mlp_gate=gate(loader, f"{base}.cross_attn_mlp_gate"),
            halves=loader.halves(q),
        )

    # ------------------------------------------------------------------ requests

    def check(self, context: TextContext) -> None:
        """Raise InputError unless the images' tokens, aspect ratios and pixels fit the model."""
        if not isinstance(context, TextAndVisionContext):
            return
        if context.pixel_values:
            raise InputError("images need a range of tokens; pixel_values has none")
        if not context.images:
            return
        if not is_tiled(context):
            raise InputError(f"{IDS} is missing in extra_model_args")
        seen = seen_images(context)
        if context.vision_token_ids != [self.config.image_token_id]:
            raise InputError(f"vision_token_ids must be [{self.config.image_token_id}]")
        if context.extra_model_args[MASK].shape[2] != self.config.vision.max_tiles:
            raise InputError(f"this model has {self.config.vision.max_tiles} tiles per image")
        if seen.ranges[0][1] != self._row_length():
            raise InputError(f"an image of this model has {self._row_length() - 1} tokens")
        for image, canvas in zip(context.images, seen.canvases, strict=True):
            why = self._unusable(image.pixel_values, canvas)
            if why is not None:
                raise why

    def refusal(self, image: ChunkImage) -> BatonError | None:
        """Return why the image cannot be encoded here, or None."""
        if self._tower is None:
            return HandoffFailed("this worker has no vision tower to compute images again")
        if image.first + image.count != self._row_length() - 1:
            return InputError(f"an image of this model has {self._row_length() - 1} tokens")
        return self._unusable(image.pixels, image.grid)

    def _row_length(self) -> int:
        """Return the positions of an image's blocks."""
        block_size = self.kv_layout.block_size
        return block_count(self.config.image_positions, block_size) * block_size

    def _unusable(
        self, pixels: npt.NDArray[np.generic], canvas: tuple[int, int]
    ) -> BatonError | None:
        vision = self.config.vision
        if canvas[0] * canvas[1] > vision.max_tiles:
            return InputError(f"this model has at most {vision.max_tiles} tiles per image")
        if not pixels.size:
            return HandoffFailed("the pixels of an image were dropped after its handoff")
        most = tuple(vision.tile_size * count for count in canvas)
        fits = pixels.ndim == 3 and pixels.shape[2] == 3
        if pixels.dtype != np.uint8 or not fits or np.greater(pixels.shape[:2], most).any():
            return InputError(
                f"pixels must be uint8 of at most {most[0]} x {most[1]} RGB pixels, not "
                f"{pixels.dtype} of {pixels.shape}"
            )
        return None

    # ------------------------------------------------------------------ the forward pass

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Return the logits of the wanted rows; reads the images in the step."""
        tables = model_inputs.block_tables
        if model_inputs.images:
            self._write_images(model_inputs)
        text = text_rows(model_inputs)
        if not len(text.tokens):
            for layer in range(self.config.num_layers):
                if text.layer_done is not None:
                    text.layer_done(layer + 1)
            return ModelOutputs(next_token_logits=self.backend.empty(0, self.vocab_size))
        wanted = narrowed(text)
        rows = self._viewing(text, tables)
        return self.forward(rows, rows if wanted is text else self._viewing(wanted, tables))

    def _viewing(self, inputs: ModelInputs, tables: I32) -> ModelInputs:
        """Return the uploaded rows with what they see of the images in ``tables``."""
        return replace(
            uploaded(inputs, self.backend), cross=cross_view(inputs, tables, self._shape)
        )

    def _write_images(self, inputs: ModelInputs) -> None:
        """Write the keys and values of the step's images, encoded or from the cache."""
        began = time.perf_counter()
        for image in inputs.images:
            encoded = self.encoded.get(image.key, image.grid)
            if encoded is None:
                encoded = self._encode(image, inputs)
                self.encoded.put(image.key, image.grid, encoded)
            self._write_image(image, encoded.features, inputs)
        self.encode_seconds += time.perf_counter() - began

    def _encode(self, image: ChunkImage, inputs: ModelInputs) -> Encoded:
        if self._tower is None:
            raise HandoffFailed("this worker has no vision tower")
        report = inputs.layer_done
        pixels = np.ascontiguousarray(image.pixels).view(np.uint8)
        on_progress = None if report is None else lambda: report(0)
        return Encoded(self._tower.encode(pixels, image.grid, on_progress))

    def _write_image(self, image: ChunkImage, features: F32, inputs: ModelInputs) -> None:
        """Write the keys and values of an image's blocks in the step, in all layers."""
        shape, block_size = self._shape, self.kv_layout.block_size
        sequence = int(np.searchsorted(inputs.row_offsets, image.row, "right")) - 1
        position = int(inputs.positions[image.row])
        # The first block of an image begins with its aspect ratio id, one position before it.
        begin = (position - (image.first == 0)) // block_size * block_size
        slots = image_slots(
            inputs.block_tables[sequence], begin, position + image.count, inputs, shape
        )
        first = (begin - (position - image.first - 1)) * shape.per_position
        part = features[first : first + len(slots)]
        slots = slots[: len(part)]
        if not len(part):
            return
        pool = _joined(inputs.pool)
        step = shape.per_position * inputs.pool.shape[1] * block_size
        for layer in (layer for group in self._cross.values() for layer in group):
            self._write_kv(layer, part, slots + layer.number * step, pool)

    def _write_kv(self, layer: CrossLayer, part: F32, slots: I64, pool: F32) -> None:
        if layer.kv is None:
            raise HandoffFailed("this worker has no weights for the keys of images")
        config, kernels, space = self.config, self.backend, self._space
        heads, dim = config.num_kv_heads, config.head_dim
        kv = space.rows("image_kv", len(part), 2 * heads * dim)
        kernels.linear(part, layer.kv, kv)
        keys = space.rows("image_k", len(part) * heads, dim)
        keys[:] = kv[:, : heads * dim].reshape(-1, dim)
        normed = space.rows("image_k_normed", len(part) * heads, dim)
        kernels.rms_norm(keys, layer.k_norm, config.rms_norm_eps, normed)
        block, offset = np.divmod(slots, pool.shape[3])
        pool[block, 0, :, offset] = normed.reshape(-1, heads, dim)
        pool[block, 1, :, offset] = kv[:, heads * dim :].reshape(-1, heads, dim)

    def _add_layers(self, index: int, inputs: ModelInputs, residual: F32, normed: F32) -> None:
        """Compute the cross-attention layers after the layer ``index``, for rows with images."""
        layers, view = self._cross.get(index), inputs.cross
        if not layers or not isinstance(view, CrossView):
            return
        some, some_normed = residual, normed
        if view.rows is not None:
            some = self._space.rows("seeing", len(view.rows), residual.shape[1])
            some_normed = self._space.rows("seeing_normed", len(view.rows), residual.shape[1])
            self.backend.take_rows(residual, view.rows, some)
        eps = self.config.rms_norm_eps
        self.backend.rms_norm(some, layers[0].input_norm, eps, some_normed)
        norms = [*(layer.input_norm for layer in layers[1:]), self._norm_after(index)]
        for layer, following in zip(layers, norms, strict=True):
            self._read_images(layer, inputs.pool, view, some, some_normed)
            self._cross_mlp(layer, view, some, some_normed, following)
        if view.rows is not None:
            self.backend.put_rows(some, view.rows, residual)
            self.backend.put_rows(some_normed, view.rows, normed)

    def _read_images(
        self, layer: CrossLayer, pool: F32, view: CrossView, residual: F32, normed: F32
    ) -> None:
        """Add attention to the images to ``residual``; ``normed`` becomes the MLP's input."""
        config, kernels, space, rows = self.config, self.backend, self._space, len(normed)
        heads, dim = config.num_heads, config.head_dim
        wide = heads * dim
        raw, q = space.rows("cross_raw", rows, wide), space.rows("cross_q", rows, wide)
        kernels.linear(normed, layer.q, raw)
        kernels.rms_norm(
            raw.reshape(-1, dim), layer.q_norm, config.rms_norm_eps, q.reshape(-1, dim)
        )
        queries, mixed = q.reshape(rows, heads, dim), space.rows("mixed", rows, wide)
        first = layer.number * self._shape.per_position * pool.shape[1]
        tables = view.tables + np.int32(first)
        joined, scale = _joined(pool), dim**-0.5
        kernels.attention(
            queries, joined, tables, view.offsets, view.ends, scale, 0, mixed, None, layer.halves
        )
        for run in view.packed:
            blocks, ends = _packed(joined, run.slots + first * pool.shape[4])
            count = run.rows.stop - run.rows.start
            kernels.attention(
                queries[run.rows],
                blocks,
                np.arange(len(blocks), dtype=np.int32)[None],
                np.array([0, count], np.int32),
                np.full(count, ends, np.int32),
                scale,
                0,
                mixed[run.rows],
                None,
                layer.halves,
            )
        delta = space.rows("delta", rows, config.hidden_size)
        kernels.linear(mixed, layer.o, delta)
        delta *= layer.attention_gate
        kernels.add_rms_norm(delta, residual, layer.post_norm, config.rms_norm_eps, normed)

    def _cross_mlp(
        self, layer: CrossLayer, view: CrossView, residual: F32, normed: F32, following: F32
    ) -> None:
        """Add the MLP to ``residual`` in rows that see an image."""
        kernels, space, rows = self.backend, self._space, len(normed)
        width = self.config.intermediate_size
        gate_up, active = space.rows("gate_up", rows, 2 * width), space.rows("active", rows, width)
        delta = space.rows("delta", rows, self.config.hidden_size)
        kernels.gated_mlp(normed, layer.gate_up, layer.down, gate_up, active, delta)
        delta *= view.scale * layer.mlp_gate
        kernels.add_rms_norm(delta, residual, following, self.config.rms_norm_eps, normed)


def gate(loader: WeightLoader, name: str) -> np.float32:
    """Return the factor of a gate ``[1]``."""
    return np.float32(np.tanh(loader.vector(name, 1)[0]))


def _joined(pool: F32) -> F32:
    """Return the pool with the blocks of all layers in one row, in the same memory."""
    return pool.reshape(-1, *pool.shape[2:])


def _packed(pool: F32, slots: I64) -> tuple[F32, int]:
    """Return blocks with the keys and values of ``slots`` without gaps, and their last slot."""
    size = pool.shape[3]
    found = np.zeros((-(-len(slots) // size), *pool.shape[1:]), np.float32)
    block, offset = np.divmod(slots, size)
    to_block, to_offset = np.divmod(np.arange(len(slots)), size)
    found[to_block, :, :, to_offset] = pool[block, :, :, offset]
    return found, len(slots) - 1
