"""The configs of a picture model's parts, and the tensors of one part.

Configs are read as untrusted input; the families check that the parts fit each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from baton.proto.errors import CheckpointError
from baton.proto.limits import MAX_LAYERS, MAX_SIZE

from ..loading.config_numbers import Epsilon, Finite
from ..loading.json_files import read_json
from ..loading.safetensors import TensorStore, Weights

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Some = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]


class ClipConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``text_encoder/config.json``: a CLIP text model."""

    vocab_size: Size = 49408
    hidden_size: Size = 512
    intermediate_size: Size = 2048
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 8
    max_position_embeddings: Size = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: Epsilon = 1e-5
    eos_token_id: int = 49407


class T5Config(msgspec.Struct, frozen=True, kw_only=True):
    """``text_encoder_2/config.json``: the encoder of a T5 with gated GELU."""

    vocab_size: Size = 32128
    d_model: Size = 512
    d_kv: Size = 64
    d_ff: Size = 2048
    num_layers: Layers = 6
    num_heads: Size = 8
    relative_attention_num_buckets: Annotated[int, Meta(ge=4, le=4096)] = 32
    relative_attention_max_distance: Annotated[int, Meta(ge=2, le=1 << 20)] = 128
    layer_norm_epsilon: Epsilon = 1e-6
    feed_forward_proj: str = "relu"


class FluxConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``transformer/config.json``. ``axes_dims_rope``: dims of the angles of id, row, column."""

    patch_size: int = 1
    in_channels: Size = 64
    out_channels: Size | None = None
    num_layers: Some = 19
    num_single_layers: Some = 38
    attention_head_dim: Size = 128
    num_attention_heads: Size = 24
    joint_attention_dim: Size = 4096
    pooled_projection_dim: Size = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[Size, Size, Size] = (16, 56, 56)

    @property
    def hidden_size(self) -> int:
        """Width of both streams."""
        return self.num_attention_heads * self.attention_head_dim


class ZImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``transformer/config.json`` of Z-Image.

    ``axes_dims``: dims of the angles of sequence, row and column; ``axes_lens``: positions that
    each axis has. ``t_scale``: multiplies times from 0 to 1.
    """

    all_patch_size: tuple[int, ...] = (2,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: Size = 16
    dim: Size = 3840
    n_layers: Some = 30
    n_refiner_layers: Some = 2
    n_heads: Size = 30
    n_kv_heads: Size = 30
    norm_eps: Epsilon = 1e-5
    qk_norm: bool = True
    cap_feat_dim: Size = 2560
    rope_theta: Annotated[float, Meta(gt=1, le=1e9)] = 256.0
    t_scale: Annotated[float, Meta(gt=0, le=1e6)] = 1000.0
    axes_dims: tuple[Size, Size, Size] = (32, 48, 48)
    axes_lens: tuple[Size, Size, Size] = (1024, 512, 512)
    siglip_feat_dim: Size | None = None

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.n_heads

    @property
    def mlp_size(self) -> int:
        """Inner width of the gated MLP."""
        return int(self.dim / 3 * 8)

    @property
    def time_size(self) -> int:
        """Width of the time embedding."""
        return min(self.dim, 256)


class VaeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``vae/config.json``: a latent is ``(x - shift_factor) * scaling_factor`` of the encoder."""

    out_channels: Size = 3
    latent_channels: Size = 4
    block_out_channels: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=8)] = (64,)
    layers_per_block: Layers = 1
    norm_num_groups: Size = 32
    act_fn: str = "silu"
    scaling_factor: Finite = 0.18215
    shift_factor: Finite | None = None
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    @property
    def scale(self) -> int:
        """Pixels per latent in each direction."""
        return int(2 ** (len(self.block_out_channels) - 1))


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``scheduler/scheduler_config.json``: flow matching with Euler steps."""

    num_train_timesteps: Size = 1000
    shift: Annotated[float, Meta(gt=0, le=1e3)] = 1.0
    use_dynamic_shifting: bool = False
    base_shift: Annotated[float, Meta(ge=-20, le=20)] = 0.5
    max_shift: Annotated[float, Meta(ge=-20, le=20)] = 1.15
    base_image_seq_len: Size = 256
    max_image_seq_len: Size = 4096
    time_shift_type: str = "exponential"


C = TypeVar("C", bound=msgspec.Struct)


def no_watch() -> None:
    """Do nothing: what the models call after each layer until a caller sets another function."""


@dataclass(slots=True, frozen=True)
class ModelPart:
    """One part of a picture model: its folder, class and tensors."""

    folder: Path
    architecture: str
    tensors: TensorStore

    def take(self, name: str, shape: tuple[int, ...]) -> Weights:
        """Return a tensor as float32 or as uint16 bfloat16 bits; float16 is widened to float32.

        Raises CheckpointError if the tensor is missing or has another shape.
        """
        return self.tensors.take(name, shape)


def read_config(path: Path, kind: type[C]) -> C:
    """Read a config. Raises CheckpointError if it is missing or invalid."""
    try:
        return msgspec.convert(read_json(path), kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
