"""Flux: CLIP and T5 encode a prompt, and true CFG keeps away from a negative one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.contexts.pixels import PixelContext
from baton.proto.contexts.tokens import TokenBuffer
from baton.proto.errors import CheckpointError, InputError
from baton.proto.picture_requests import FLUX, check_prompts

from ..kernels.host_backend import PictureBackend
from ..models.weights import Progress
from .clip import ClipTextEncoder
from .configs import ClipConfig, FluxConfig, T5Config, VaeConfig, read_config
from .family import EncodedPrompt, OpenPart
from .flux import FluxTransformer
from .guidance import TrueCfg
from .memory import row_bytes
from .t5 import T5Encoder

_ACTIVATIONS = ("quick_gelu", "gelu")


class FluxEncoders:
    """CLIP and T5. Not thread-safe."""

    def __init__(self, clip: ClipTextEncoder, t5: T5Encoder) -> None:
        self.clip, self.t5 = clip, t5

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer; its exceptions end the encoding."""
        self.clip.after_layer = self.t5.after_layer = after_layer

    def encode(self, request: PixelContext, prefix: str) -> EncodedPrompt:
        """Return the vectors of T5 and the pooled vector of CLIP for a prompt."""
        first = token_ids(getattr(request, f"{prefix}tokens"), f"{prefix}tokens")
        second = token_ids(getattr(request, f"{prefix}tokens_2"), f"{prefix}tokens_2")
        return EncodedPrompt(self.t5.encode(second), self.clip.pooled([first])[0])


def token_ids(buffer: TokenBuffer | None, name: str) -> npt.NDArray[np.int32]:
    """Return a prompt's tokens. Raises InputError if they are missing or do not fit int32."""
    if buffer is None:
        raise InputError(f"{name} are missing; this model reads a prompt with two text encoders")
    ids = buffer.all
    if len(ids) and (ids.min() < 0 or ids.max() >= 1 << 31):
        raise InputError(f"{name}: a token id does not fit 32 bits")
    return ids.astype(np.int32)


@dataclass(slots=True, frozen=True)
class FluxFamily:
    """See :class:`.family.Family`."""

    clip: ClipConfig
    t5: T5Config
    flux: FluxConfig

    architecture = FLUX
    encoder_parts = ("text_encoder", "text_encoder_2")
    row_multiple = 1
    decoder = None
    guidance = TrueCfg()

    @classmethod
    def open(cls, folder: Path, vae: VaeConfig) -> FluxFamily:
        """Read the configs. Raises CheckpointError for settings that the models do not compute."""
        family = cls(
            clip=read_config(folder / "text_encoder" / "config.json", ClipConfig),
            t5=read_config(folder / "text_encoder_2" / "config.json", T5Config),
            flux=read_config(folder / "transformer" / "config.json", FluxConfig),
        )
        _refuse(folder, family, vae)
        return family

    @property
    def text_width(self) -> int:
        """Numbers of a vector of T5."""
        return self.flux.joint_attention_dim

    @property
    def pooled_width(self) -> int:
        """Numbers of the pooled vector of CLIP."""
        return self.flux.pooled_projection_dim

    @property
    def token_width(self) -> int:
        """Numbers of a latent token."""
        return self.flux.in_channels

    @property
    def row_bytes(self) -> int:
        """Memory that a step of the transformer needs for each row."""
        return row_bytes(self.flux.hidden_size, self.head_dim)

    @property
    def configs(self) -> tuple[msgspec.Struct, ...]:
        """The configs of encoders and transformer."""
        return self.clip, self.t5, self.flux

    @property
    def widths(self) -> Mapping[str, int]:
        """Widths of rows that a GPU's kernels read."""
        return {
            "hidden_size of text_encoder": self.clip.hidden_size,
            "intermediate_size of text_encoder": self.clip.intermediate_size,
            "d_model of text_encoder_2": self.t5.d_model,
            "d_ff of text_encoder_2": self.t5.d_ff,
            "in_channels of transformer": self.flux.in_channels,
            "hidden size of transformer": self.flux.hidden_size,
        }

    @property
    def head_dim(self) -> int:
        """Channels of a head of the transformer."""
        return self.flux.attention_head_dim

    def check_request(self, request: PixelContext) -> None:
        """Raise InputError for fields that do not fit Flux."""
        check_prompts(request, FLUX)

    def check_size(self, texts: int, rows: int, columns: int) -> None:
        """Accept all sizes: the positions of Flux have no limit."""

    def load_encoders(
        self, part: OpenPart, backend: PictureBackend, on_progress: Progress | None
    ) -> FluxEncoders:
        """Load CLIP and T5."""
        return FluxEncoders(
            ClipTextEncoder(part("text_encoder"), self.clip, backend, on_progress),
            T5Encoder(part("text_encoder_2"), self.t5, backend, on_progress),
        )

    def load_transformer(
        self, part: OpenPart, backend: PictureBackend, on_progress: Progress | None
    ) -> FluxTransformer:
        """Load the transformer."""
        return FluxTransformer(part("transformer"), self.flux, backend, on_progress)


def _refuse(folder: Path, family: FluxFamily, vae: VaeConfig) -> None:
    clip, t5, flux = family.clip, family.t5, family.flux
    dims, distance = flux.axes_dims_rope, t5.relative_attention_max_distance
    exact = t5.relative_attention_num_buckets // 4
    width, pooled = flux.joint_attention_dim, flux.pooled_projection_dim
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
        (width != t5.d_model, "transformer", "joint_attention_dim"),
        (pooled != clip.hidden_size, "transformer", "pooled_projection_dim"),
    )
    for wrong, part, problem in problems:
        if wrong:
            raise CheckpointError(f"{folder / part / 'config.json'}: {problem}: unsupported")
