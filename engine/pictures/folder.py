"""A picture model in the diffusers layout: ``model_index.json`` and one folder per part.

Opening reads configs and headers of tensors, as untrusted input. A setting that the models do not
compute is refused with a CheckpointError that names file and key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.proto.errors import CheckpointError
from baton.proto.layout import KVLayout
from baton.proto.picture_requests import FLUX, Z_IMAGE

from ..loading.json_files import read_json
from ..loading.safetensors import TensorStore
from .configs import ModelPart, SchedulerConfig, VaeConfig, read_config
from .family import Family
from .flux_family import FluxFamily
from .zimage_family import ZImageFamily

_FAMILIES: dict[str, Callable[[Path, VaeConfig], Family]] = {
    FLUX: FluxFamily.open,
    Z_IMAGE: ZImageFamily.open,
}
DRAWING_PARTS = ("transformer", "vae")
"""The parts of a decode worker; the text encoders are those of a prefill worker."""


@dataclass(slots=True, frozen=True)
class PictureFolder:
    """An opened picture model. Weights are read when a part is loaded."""

    folder: Path
    family: Family
    vae: VaeConfig
    scheduler: SchedulerConfig

    def part(self, name: str) -> ModelPart:
        """Open the tensors of a text encoder, of ``transformer`` or of ``vae``."""
        folder = self.folder / name
        stem = "diffusion_pytorch_model" if name in DRAWING_PARTS else "model"
        return ModelPart(folder, name, TensorStore.open(folder, stem))

    def parts_bytes(self, names: tuple[str, ...]) -> int:
        """Return the bytes of the weights of some parts."""
        return sum(self.part(name).tensors.nbytes for name in names)

    def state_layout(self, block_size: int) -> KVLayout:
        """Return the layout of the pool: a position holds one vector of the last text encoder.

        Keys and values of a position are the two halves of the vector. Raises CheckpointError if
        the vectors do not fit.
        """
        width, pooled = self.family.text_width, self.family.pooled_width
        if width % 2 or pooled > width:
            raise CheckpointError(
                f"{self.folder / 'transformer' / 'config.json'}: vectors of {width} numbers must "
                f"be even and at least as wide as the pooled vector of {pooled}"
            )
        return KVLayout(num_layers=1, num_kv_heads=1, head_dim=width // 2, block_size=block_size)

    @property
    def pixels_per_token(self) -> int:
        """Width and height of the square of pixels that one latent token stands for."""
        return 2 * self.vae.scale


def open_folder(folder: str | Path) -> PictureFolder:
    """Open a picture model.

    Raises CheckpointError if a config is missing, invalid or unsupported.
    """
    path = Path(folder)
    index = path / "model_index.json"
    kind = read_json(index).get("_class_name")
    opening = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if opening is None:
        raise CheckpointError(
            f"{index}: a {str(kind)[:80]} is not supported, only {' and '.join(_FAMILIES)}"
        )
    vae = read_config(path / "vae" / "config.json", VaeConfig)
    opened = PictureFolder(
        folder=path,
        family=opening(path, vae),
        vae=vae,
        scheduler=read_config(path / "scheduler" / "scheduler_config.json", SchedulerConfig),
    )
    _refuse(path / "vae" / "config.json", vae)
    _refuse_sampling(path / "scheduler" / "scheduler_config.json")
    return opened


def _refuse(path: Path, vae: VaeConfig) -> None:
    """Raise CheckpointError for settings that the VAE does not compute."""
    problems = (
        (not 1e-6 < abs(vae.scaling_factor) < 1e6, f"scaling_factor {vae.scaling_factor}"),
        (vae.act_fn != "silu", f"act_fn {vae.act_fn!r}"),
        (vae.out_channels != 3, f"out_channels {vae.out_channels}"),
        (any(c % vae.norm_num_groups for c in vae.block_out_channels), "norm_num_groups"),
    )
    for wrong, problem in problems:
        if wrong:
            raise CheckpointError(f"{path}: {problem}: unsupported")


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
