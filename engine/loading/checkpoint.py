"""A model folder in the Hugging Face layout: config, tensors, generation defaults.

Opening reads only the configs and the tensors' headers. The weights are read when the
model packs them. All tensors are read through :meth:`Checkpoint.take`, which checks the shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from baton.proto.errors import CheckpointError, ConfigError

from .fp8 import read_fp8
from .generation_config import GenerationConfig, load_generation_config
from .gguf import gguf_file, open_parts
from .gguf_folder import local_folder
from .gguf_tensors import GgufTensors
from .json_files import read_json
from .model_config import ModelConfig, load_model_config
from .safetensors import SINGLE_NAME, TensorStore, Weights

_SAMPLE_BYTES = 4096
_SAMPLES = 16


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """An opened model folder."""

    folder: Path
    config: ModelConfig
    generation: GenerationConfig
    tensors: TensorStore

    @property
    def architecture(self) -> str:
        """``architectures[0]`` of config.json."""
        return self.config.architecture

    def take(self, name: str, shape: tuple[int, ...]) -> Weights:
        """Return a tensor as float32 or as uint16 bfloat16 bits; float16 is widened to float32.

        Raises :class:`CheckpointError` with the tensor's name, the expected and the found shape.
        """
        return self.tensors.take(name, shape)

    def served_length(self, wanted: int) -> int:
        """Return the context length to serve; ``wanted`` 0: the model's usual one.

        Raises :class:`ConfigError` if the model has fewer positions.
        """
        rope = self.config.rope
        if not 0 <= wanted <= rope.ceiling():
            raise ConfigError(
                f"max_model_len {wanted} is more than the {rope.ceiling()} tokens of {self.folder}"
            )
        return wanted or rope.default_length()

    def weight_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes of the tensors in the file, sorted."""
        return tuple(sorted({self.tensors.entry(name).dtype for name in self.tensors}))

    def fingerprint(self, *, full: bool = False) -> str:
        """Return the BLAKE2b-128 (hex) of config, tensor names, shapes, dtypes and data.

        The data is represented by evenly spread samples of every tensor, or completely with
        ``full``. Samples distinguish checkpoints; they do not prove that a file is undamaged.
        """
        digest = blake2b(digest_size=16)
        digest.update(msgspec.msgpack.encode(self.config))
        digest_tensors(digest, self.tensors, full=full)
        return digest.hexdigest()


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a model folder or GGUF file.

    Raises :class:`CheckpointError` if a file is missing or invalid.
    """
    path = Path(local_folder(folder))
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such model folder")
    config = load_model_config(path)
    generation = load_generation_config(path, config)
    return Checkpoint(path, config, generation, _open_tensors(path))


def _open_tensors(folder: Path) -> TensorStore:
    """Open the safetensors files, or the GGUF file of a folder without them."""
    file = gguf_file(folder)
    if file is None or (folder / SINGLE_NAME).is_file():
        quantization = read_json(folder / "config.json").get("quantization_config")
        return TensorStore.open(folder, fp8=read_fp8(quantization) if quantization else None)
    parts = open_parts(file)
    metadata = parts[0].metadata
    stores = [GgufTensors(part, metadata) for part in parts]
    return TensorStore({name: store for store in stores for name in store.entries})


def require_tokenizer(folder: str | Path) -> Path:
    """Return the path of tokenizer.json. Raises :class:`CheckpointError` if it is missing."""
    path = Path(local_folder(folder)) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: tokenizer.json is missing; only tokenizers in this format are supported"
        )
    return path


def digest_tensors(digest: blake2b, tensors: TensorStore, *, full: bool) -> None:
    """Add names, shapes, dtypes and data to a fingerprint; see :meth:`Checkpoint.fingerprint`."""
    for name in sorted(tensors):
        entry = tensors.entry(name)
        digest.update(msgspec.msgpack.encode((name, entry.dtype, entry.shape)))
        _digest_data(digest, tensors.raw(name), full=full)


def _digest_data(digest: blake2b, data: memoryview, *, full: bool) -> None:
    if full or len(data) <= _SAMPLES * _SAMPLE_BYTES:
        digest.update(data)
        return
    last = len(data) - _SAMPLE_BYTES
    for i in range(_SAMPLES):
        at = last * i // (_SAMPLES - 1)
        digest.update(data[at : at + _SAMPLE_BYTES])
