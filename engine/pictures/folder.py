"""A picture model in the diffusers layout: ``model_index.json`` and one folder per part.

Opening reads configs and headers of tensors, as untrusted input. A setting that the models do not
compute is refused with a CheckpointError that names file and key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ...proto.errors import CheckpointError
from ...proto.limits import MAX_LAYERS, MAX_SIZE
from ..loading.safetensors import TensorStore, Weights, read_json

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Some = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Eps = Annotated[float, Meta(ge=0, le=1)]

_PIPELINE = "FluxPipeline"
_ACTIVATIONS = ("quick_gelu", "gelu")


class ClipConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``text_encoder/config.json``: a CLIP text model."""

    vocab_size: Size = 49408
    hidden_size: Size = 512
    intermediate_size: Size = 2048
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 8
    max_position_embeddings: Size = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: Eps = 1e-5
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
    layer_norm_epsilon: Eps = 1e-6
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


class VaeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``vae/config.json``: a latent is ``(x - shift_factor) * scaling_factor`` of the encoder."""

    out_channels: Size = 3
    latent_channels: Size = 4
    block_out_channels: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=8)] = (64,)
    layers_per_block: Layers = 1
    norm_num_groups: Size = 32
    act_fn: str = "silu"
    scaling_factor: float = 0.18215
    shift_factor: float | None = None
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
        found = self.tensors.entry(name).shape
        if found != shape:
            raise CheckpointError(
                f"{self.tensors.path(name)}: tensor '{name}' has shape {list(found)}, "
                f"config.json requires {list(shape)}"
            )
        tensor = self.tensors.tensor(name)
        return tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor


@dataclass(slots=True, frozen=True)
class PictureFolder:
    """An opened picture model. Weights are read when a part is loaded."""

    folder: Path
    clip: ClipConfig
    t5: T5Config
    flux: FluxConfig
    vae: VaeConfig
    scheduler: SchedulerConfig

    def part(self, name: str) -> ModelPart:
        """Open the tensors of ``text_encoder``, ``text_encoder_2``, ``transformer`` or ``vae``."""
        folder = self.folder / name
        stem = "diffusion_pytorch_model" if name in ("transformer", "vae") else "model"
        return ModelPart(folder, name, TensorStore.open(folder, stem))

    @property
    def pixels_per_token(self) -> int:
        """Width and height of the square of pixels that one latent token stands for."""
        return 2 * self.vae.scale


def open_folder(folder: str | Path) -> PictureFolder:
    """Open a Flux model. Raises CheckpointError if a config is missing, invalid or unsupported."""
    path = Path(folder)
    index = path / "model_index.json"
    kind = read_json(index).get("_class_name")
    if kind != _PIPELINE:
        raise CheckpointError(f"{index}: a {str(kind)[:80]} is not supported, only {_PIPELINE}")
    opened = PictureFolder(
        folder=path,
        clip=_read(path / "text_encoder" / "config.json", ClipConfig),
        t5=_read(path / "text_encoder_2" / "config.json", T5Config),
        flux=_read(path / "transformer" / "config.json", FluxConfig),
        vae=_read(path / "vae" / "config.json", VaeConfig),
        scheduler=_read(path / "scheduler" / "scheduler_config.json", SchedulerConfig),
    )
    _refuse(opened)
    _refuse_sampling(path / "scheduler" / "scheduler_config.json")
    return opened


def _read(path: Path, kind: type[C]) -> C:
    try:
        return msgspec.convert(read_json(path), kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _refuse(model: PictureFolder) -> None:
    """Raise CheckpointError for settings that the models do not compute."""
    clip, t5, flux, vae = model.clip, model.t5, model.flux, model.vae
    dims, distance = flux.axes_dims_rope, t5.relative_attention_max_distance
    exact = t5.relative_attention_num_buckets // 4
    problems = (
        (clip.hidden_act not in _ACTIVATIONS, "text_encoder", f"hidden_act {clip.hidden_act!r}"),
        (clip.hidden_size % clip.num_attention_heads, "text_encoder", "heads do not divide width"),
        (
            t5.feed_forward_proj != "gated-gelu",
            "text_encoder_2",
            "feed_forward_proj not gated-gelu",
        ),
        (distance <= exact, "text_encoder_2", f"relative_attention_max_distance {distance}"),
        (flux.patch_size != 1, "transformer", f"patch_size {flux.patch_size}"),
        (sum(dims) != flux.attention_head_dim, "transformer", f"axes_dims_rope {dims}"),
        (any(dim % 2 for dim in dims), "transformer", f"axes_dims_rope {dims}"),
        (flux.in_channels != 4 * vae.latent_channels, "transformer", "in_channels do not fit vae"),
        (flux.out_channels not in (None, flux.in_channels), "transformer", "out_channels"),
        (flux.joint_attention_dim != t5.d_model, "transformer", "joint_attention_dim"),
        (flux.pooled_projection_dim != clip.hidden_size, "transformer", "pooled_projection_dim"),
        (not 1e-6 < abs(vae.scaling_factor) < 1e6, "vae", f"scaling_factor {vae.scaling_factor}"),
        (vae.act_fn != "silu", "vae", f"act_fn {vae.act_fn!r}"),
        (vae.out_channels != 3, "vae", f"out_channels {vae.out_channels}"),
        (any(c % vae.norm_num_groups for c in vae.block_out_channels), "vae", "norm_num_groups"),
    )
    for wrong, part, problem in problems:
        if wrong:
            raise CheckpointError(f"{model.folder / part / 'config.json'}: {problem}: unsupported")


def _refuse_sampling(path: Path) -> None:
    raw = read_json(path)
    if raw.get("time_shift_type", "exponential") != "exponential":
        raise CheckpointError(f"{path}: time_shift_type must be exponential")
    for key in (
        "invert_sigmas",
        "shift_terminal",
        "stochastic_sampling",
        "use_beta_sigmas",
        "use_exponential_sigmas",
        "use_karras_sigmas",
    ):
        if raw.get(key):
            raise CheckpointError(f"{path}: {key} is not supported")
