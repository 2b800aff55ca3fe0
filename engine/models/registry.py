"""Which class serves which ``architectures[0]`` of a config.json."""

from __future__ import annotations

from ...proto.errors import CheckpointError
from ..checkpoint import Checkpoint
from ..kernels.backend import Backend
from .decoder import Decoder, Progress

MODELS: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}


def build_model(
    checkpoint: Checkpoint,
    backend: Backend,
    max_length: int,
    on_progress: Progress | None = None,
) -> Decoder:
    """Load the weights of a checkpoint into the model of its architecture.

    ``max_length``: positions served; ``on_progress(done, total)``: bytes of tensors packed.
    """
    name = checkpoint.config.architecture
    if name not in MODELS:
        raise CheckpointError(
            f"{checkpoint.folder}: unsupported architecture {name}; "
            f"supported are {', '.join(MODELS)}"
        )
    return MODELS[name](checkpoint, backend, max_length, on_progress)
