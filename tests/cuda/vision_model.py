"""Random checkpoints with the head sizes and widths of real vision towers, and requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.benchmarks.checkpoints import Shape, write_config, write_tensors
from baton.engine.loading.vision_config import QWEN2_5_VL, QWEN3_VL
from baton.proto.contexts.images import ImageMetadata
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.sampling import SamplingParams

IMAGE = 250
"""The placeholder token."""
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class VisionShape(Shape):
    """A decoder with a tower; ``intermediate`` of the tower is ``tower_wide``.

    ``tower``: keys of ``vision_config`` beside the sizes.
    """

    architecture: str = QWEN2_5_VL
    depth: int = 3
    tower_hidden: int = 160
    tower_heads: int = 2
    tower_wide: int = 172
    patch: int = 14
    rope: dict[str, Any] = field(default_factory=dict)
    tower: dict[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        """Of the decoder."""
        return 64

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        is_deep = self.architecture == QWEN3_VL
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, merged = self.tower_hidden, 4 * self.tower_hidden
        kernel = (hidden, 3, 2, self.patch, self.patch)
        shapes: dict[str, tuple[int, ...]] = {"visual.patch_embed.proj.weight": kernel}
        if is_deep:
            shapes["visual.patch_embed.proj.bias"] = (hidden,)
            shapes["visual.pos_embed.weight"] = (self.tower["num_position_embeddings"], hidden)
        for name, shape in super().tensors().items():
            if is_deep and name.endswith("input_layernorm.weight"):
                attention = name.replace("input_layernorm.weight", "self_attn")
                shapes |= dict.fromkeys(
                    [f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"], (self.head_dim,)
                )
            if "_proj" in name and ".self_attn." in name:
                wide = q if "q_proj" in name or "o_proj" in name else kv
                shape = (self.hidden, wide) if "o_proj" in name else (wide, self.hidden)
                if not is_deep and "o_proj" not in name:
                    shapes[name.replace("weight", "bias")] = (wide,)
            shapes[name] = shape
        for layer in range(self.depth):
            shapes |= _block(f"visual.blocks.{layer}", hidden, self.tower_wide, is_deep)
        if is_deep:
            shapes |= _deep_merger("visual.merger", hidden, merged, self.hidden)
            for i in range(len(self.tower["deepstack_visual_indexes"])):
                name = f"visual.deepstack_merger_list.{i}"
                shapes |= _deep_merger(name, merged, merged, self.hidden)
            return {_nested(name): shape for name, shape in shapes.items()}
        return shapes | {
            "visual.merger.ln_q.weight": (hidden,),
            "visual.merger.mlp.0.weight": (merged, merged),
            "visual.merger.mlp.0.bias": (merged,),
            "visual.merger.mlp.2.weight": (self.hidden, merged),
            "visual.merger.mlp.2.bias": (self.hidden,),
        }

    def config(self, dtype: str) -> dict[str, object]:
        """The content of config.json."""
        is_deep = self.architecture == QWEN3_VL
        text = super().config(dtype) | {"rope_scaling": self.rope}
        text["model_type"] = "qwen3_vl_text" if is_deep else "qwen2_5_vl"
        if is_deep:  # the older family has its text beside the tower, and no key for head sizes
            text = {"text_config": text | {"head_dim": self.head_dim}, "model_type": "qwen3_vl",
                    "tie_word_embeddings": False}  # fmt: skip
        return text | {
            "architectures": [self.architecture],
            "image_token_id": IMAGE,
            "vision_config": {
                "depth": self.depth,
                "hidden_size": self.tower_hidden,
                "intermediate_size": self.tower_wide,
                "num_heads": self.tower_heads,
                "patch_size": self.patch,
                "out_hidden_size": self.hidden,
                **self.tower,
            },
        }


def _nested(name: str) -> str:
    """Name in a checkpoint of Qwen3-VL."""
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1)


def _block(name: str, hidden: int, wide: int, is_deep: bool) -> dict[str, tuple[int, ...]]:
    mlp = ("linear_fc1", "linear_fc2") if is_deep else ("gate_proj", "up_proj", "down_proj")
    matrices = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)}
    matrices |= {f"mlp.{one}": (wide, hidden) for one in mlp[:-1]}
    matrices[f"mlp.{mlp[-1]}"] = (hidden, wide)
    shapes: dict[str, tuple[int, ...]] = {}
    for one, shape in matrices.items():
        shapes |= {f"{name}.{one}.weight": shape, f"{name}.{one}.bias": shape[:1]}
    for norm in ("norm1", "norm2"):
        shapes[f"{name}.{norm}.weight"] = (hidden,)
        if is_deep:
            shapes[f"{name}.{norm}.bias"] = (hidden,)
    return shapes


def _deep_merger(name: str, norm: int, merged: int, out: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.norm.weight": (norm,),
        f"{name}.norm.bias": (norm,),
        f"{name}.linear_fc1.weight": (merged, merged),
        f"{name}.linear_fc1.bias": (merged,),
        f"{name}.linear_fc2.weight": (out, merged),
        f"{name}.linear_fc2.bias": (out,),
    }


_TEXT: dict[str, Any] = {
    "name": "tiny", "vocab": 256, "hidden": 128, "intermediate": 192, "layers": 3, "heads": 4,
    "kv_heads": 2,
}  # fmt: skip
SHAPES = {
    # Heads of 80, rows of 588 pixels and an MLP of 4 mod 8 channels, as in the towers of 3B to 72B.
    "qwen2_5_vl": VisionShape(
        **_TEXT | {"heads": 2, "kv_heads": 1},  # hidden channels are heads times 64
        rope={"type": "mrope", "mrope_section": [8, 12, 12]},
        tower={"hidden_act": "silu", "window_size": 112, "fullatt_block_indexes": [1]},
    ),
    # Heads of 72, as in the towers of 8B and more.
    "qwen3_vl": VisionShape(
        **_TEXT,
        architecture=QWEN3_VL,
        tower_hidden=144,
        tower_wide=184,
        patch=16,
        rope={"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
        tower={
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
}


def write_vision_model(folder: Path, shape: VisionShape, seed: int) -> Path:
    """Write a checkpoint in bfloat16; norms and biases are random too."""
    rng = np.random.default_rng(seed)

    def values(name: str, size: tuple[int, ...]) -> list[bytes]:
        drawn = rng.standard_normal(size, np.float32)
        if len(size) == 1:
            drawn = drawn * np.float32(0.2) + np.float32(not name.endswith(".bias"))
        else:
            drawn *= np.float32(np.prod(size[1:])) ** np.float32(-0.5)
        return [(drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes()]

    write_config(folder, shape, "BF16")
    write_tensors(folder / "model.safetensors", shape.tensors(), "BF16", values)
    return folder


def picture(shape: VisionShape, grid: tuple[int, int], seed: int) -> npt.NDArray[np.uint8]:
    """Random pixels of an image of ``grid`` patches; neighbours are alike, as in photographs."""
    rng = np.random.default_rng(seed)
    side = 2 * shape.patch
    coarse = rng.integers(0, 200, (grid[0] // 2, grid[1] // 2, 3))
    wide = coarse.repeat(side, axis=0).repeat(side, axis=1)
    return (wide + rng.integers(0, 56, wide.shape)).astype(np.uint8)


def request(
    shape: VisionShape,
    prompt: list[int | npt.NDArray[np.uint8]],
    new: int = 8,
    params: SamplingParams = GREEDY,
    salt: str = "",
) -> TextAndVisionContext:
    """Make a context of tokens and pictures in their order."""
    tokens: list[int] = []
    images, grids = [], []
    for one in prompt:
        if isinstance(one, int):
            tokens.append(one)
            continue
        grid = one.shape[0] // shape.patch, one.shape[1] // shape.patch
        start = len(tokens)
        tokens += [IMAGE] * (grid[0] * grid[1] // 4)
        images.append(ImageMetadata(start_idx=start, end_idx=len(tokens), pixel_values=one))
        grids.append((1, *grid))
    return TextAndVisionContext(
        max_length=len(tokens) + new,
        tokens=np.array(tokens, np.int64),
        sampling_params=params,
        vision_token_ids=[IMAGE],
        cache_salt=salt,
        images=images,
        extra_model_args={"image_grid_thw": np.array(grids, np.int64).reshape(-1, 3)},
    )
