"""Z-Image: Qwen3 encodes a prompt, and classifier-free guidance follows it more closely."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.proto.contexts.pixels import PixelContext
from baton.proto.errors import CheckpointError, InputError
from baton.proto.picture_requests import Z_IMAGE, check_prompts

from ..kernels.host_backend import PictureBackend
from ..loading.json_files import read_json
from ..loading.model_config import ModelConfig, parse_model_config
from ..models.weights import Progress
from .configs import VaeConfig, ZImageConfig, read_config
from .family import EncodedPrompt, OpenPart
from .flux_family import token_ids
from .guidance import ClassicCfg
from .memory import row_bytes
from .prompt_decoder import PromptDecoder
from .zimage import ROW_MULTIPLE, ZImageTransformer, padded

_DECODER, _BARE = "Qwen3ForCausalLM", "Qwen3Model"


class ZImageEncoders:
    """The text encoder. Not thread-safe."""

    def __init__(self, decoder: PromptDecoder) -> None:
        self.decoder = decoder

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer; its exceptions end the encoding."""
        self.decoder.watch(after_layer)

    def encode(self, request: PixelContext, prefix: str) -> EncodedPrompt:
        """Return one vector per token of a prompt."""
        name = f"{prefix}tokens"
        return EncodedPrompt(self.decoder.states(token_ids(getattr(request, name), name)))


@dataclass(slots=True, frozen=True)
class ZImageFamily:
    """See :class:`.family.Family`."""

    text: ModelConfig
    transformer: ZImageConfig

    architecture = Z_IMAGE
    encoder_parts = ("text_encoder",)
    pooled_width = 0
    row_multiple = ROW_MULTIPLE
    guidance = ClassicCfg()

    @classmethod
    def open(cls, folder: Path, vae: VaeConfig) -> ZImageFamily:
        """Read the configs. Raises CheckpointError for settings that the models do not compute."""
        family = cls(
            text=_read_text(folder / "text_encoder" / "config.json"),
            transformer=read_config(folder / "transformer" / "config.json", ZImageConfig),
        )
        _refuse(folder, family, vae)
        return family

    @property
    def text_width(self) -> int:
        """Numbers of a state of the text encoder."""
        return self.text.hidden_size

    @property
    def token_width(self) -> int:
        """Numbers of a latent token."""
        return 4 * self.transformer.in_channels

    @property
    def row_bytes(self) -> int:
        """Memory that a step of the transformer needs for each row."""
        return row_bytes(self.transformer.dim, self.head_dim)

    @property
    def configs(self) -> tuple[msgspec.Struct, ...]:
        """The configs of encoder and transformer."""
        return self.text, self.transformer

    @property
    def widths(self) -> Mapping[str, int]:
        """Widths of rows that a GPU's kernels read."""
        return {
            "hidden_size of text_encoder": self.text.hidden_size,
            "intermediate_size of text_encoder": self.text.intermediate_size,
            "in_channels of transformer": self.token_width,
            "dim of transformer": self.transformer.dim,
            "MLP of transformer": self.transformer.mlp_size,
        }

    @property
    def decoder(self) -> ModelConfig:
        """The config of the text encoder."""
        return self.text

    @property
    def head_dim(self) -> int:
        """Channels of a head of the transformer."""
        return self.transformer.head_dim

    def check_request(self, request: PixelContext) -> None:
        """Raise InputError for fields that do not fit Z-Image."""
        check_prompts(request, Z_IMAGE)

    def check_size(self, texts: int, rows: int, columns: int) -> None:
        """Raise InputError for a prompt or picture beyond the positions of the axes."""
        needed = padded(texts) + 2, rows, columns  # text from 1 on, then the image
        parts = "prompt", "height", "width"
        for name, count, limit in zip(parts, needed, self.transformer.axes_lens, strict=True):
            if count > limit:
                raise InputError(f"{name} too large: {count} positions, limit {limit}")

    def load_encoders(
        self, part: OpenPart, backend: PictureBackend, on_progress: Progress | None
    ) -> ZImageEncoders:
        """Load the text encoder."""
        decoder = PromptDecoder(part("text_encoder"), self.text, backend, on_progress)
        return ZImageEncoders(decoder)

    def load_transformer(
        self, part: OpenPart, backend: PictureBackend, on_progress: Progress | None
    ) -> ZImageTransformer:
        """Load the transformer."""
        return ZImageTransformer(part("transformer"), self.transformer, backend, on_progress)


def _read_text(path: Path) -> ModelConfig:
    raw = read_json(path)
    names = raw.get("architectures")
    kind = names[0] if isinstance(names, list) and names else None
    if kind not in (_DECODER, _BARE):
        raise CheckpointError(f"{path}: a {str(kind)[:80]} is not supported, only {_DECODER}")
    try:
        return parse_model_config(raw, _DECODER)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error


def _refuse(folder: Path, family: ZImageFamily, vae: VaeConfig) -> None:
    text, config = family.text, family.transformer
    dims = config.axes_dims
    problems = (
        (text.num_layers < 2, "text_encoder", f"num_hidden_layers {text.num_layers}"),
        (text.hidden_size % 2, "text_encoder", f"hidden_size {text.hidden_size}"),
        (config.all_patch_size != (2,), "transformer", f"all_patch_size {config.all_patch_size}"),
        (
            config.all_f_patch_size != (1,),
            "transformer",
            f"all_f_patch_size {config.all_f_patch_size}",
        ),
        (config.dim % config.n_heads, "transformer", "n_heads do not divide dim"),
        (config.n_kv_heads != config.n_heads, "transformer", f"n_kv_heads {config.n_kv_heads}"),
        (sum(dims) != config.head_dim, "transformer", f"axes_dims {dims}"),
        (any(dim % 2 for dim in dims), "transformer", f"axes_dims {dims}"),
        (config.siglip_feat_dim is not None, "transformer", "siglip_feat_dim"),
        (config.cap_feat_dim != text.hidden_size, "transformer", "cap_feat_dim"),
        (config.in_channels != vae.latent_channels, "transformer", "in_channels do not fit vae"),
    )
    for wrong, part, problem in problems:
        if wrong:
            raise CheckpointError(f"{folder / part / 'config.json'}: {problem}: unsupported")
