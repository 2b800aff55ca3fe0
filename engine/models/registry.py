"""The supported model architectures, by the ``architectures[0]`` of a config.json.

What their requests are is in :mod:`.contexts`, which imports no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.proto.errors import CheckpointError

from ..kernels.backend import Backend
from ..loading.checkpoint import Checkpoint
from ..loading.embedding_config import EMBED, GENERATE, EmbeddingSettings
from ..loading.family_defaults import PHI3
from ..loading.gemma_config import GEMMA3
from ..loading.model_config import ModelConfig
from ..loading.tiled_config import MLLAMA
from ..loading.vision_config import QWEN2_5_VL, QWEN3_VL
from .bert import BertModel
from .cross_decoder import CrossDecoder
from .decoder import Decoder
from .gemma import GemmaDecoder
from .phi import PhiDecoder
from .vision_decoder import VisionDecoder
from .weights import Progress


class Embedder(Protocol):
    """A constructor of models that return hidden states."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        backend: Backend,
        max_length: int,
        on_progress: Progress | None,
        /,
        *,
        block_size: int,
    ) -> Decoder | BertModel:
        """Load the weights."""
        ...


def _decoder_without_head(
    checkpoint: Checkpoint,
    backend: Backend,
    max_length: int,
    on_progress: Progress | None,
    /,
    *,
    block_size: int,
) -> Decoder:
    return Decoder(checkpoint, backend, max_length, on_progress, block_size=block_size, head=False)


_MEAN = EmbeddingSettings("mean", normalize=False)


@dataclass(slots=True, frozen=True, kw_only=True)
class Architecture:
    """One supported architecture.

    ``generator``: model class that returns logits, None if the architecture has none.
    ``embedder``: constructor of a model that returns hidden states, or None. ``pooling``: used if
    the folder of an embedding model sets none. ``tokenizer``:
    file that converts text to token ids; clients read it, workers see only ids.
    """

    generator: type[Decoder] | None = None
    embedder: Embedder | None = None
    pooling: EmbeddingSettings = _MEAN
    tokenizer: str = "tokenizer.json"

    @property
    def task(self) -> str:
        """Default task; the folder or the operator may choose another."""
        return EMBED if self.generator is None else GENERATE


_CAUSAL = Architecture(
    generator=Decoder,
    embedder=_decoder_without_head,
    pooling=EmbeddingSettings("last", normalize=True),
)

_BODY = Architecture(
    embedder=_decoder_without_head, pooling=EmbeddingSettings("last", normalize=True)
)
"""A decoder without its head, as sentence-transformers saves one."""

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _CAUSAL,
    "MistralForCausalLM": _CAUSAL,
    "Qwen2ForCausalLM": _CAUSAL,
    "Qwen3ForCausalLM": _CAUSAL,
    GEMMA3: Architecture(generator=GemmaDecoder),
    PHI3: Architecture(generator=PhiDecoder),
    QWEN2_5_VL: Architecture(generator=VisionDecoder),
    QWEN3_VL: Architecture(generator=VisionDecoder),
    MLLAMA: Architecture(generator=CrossDecoder),
    "BertModel": Architecture(embedder=BertModel),
    "LlamaModel": _BODY,
    "MistralModel": _BODY,
    "Qwen2Model": _BODY,
    "Qwen3Model": _BODY,
}


def architecture_of(config: ModelConfig, origin: object) -> Architecture:
    """Return the entry of a checkpoint's architecture. CheckpointError names ``origin``."""
    entry = ARCHITECTURES.get(config.architecture)
    if entry is None:
        raise CheckpointError(
            f"{origin}: unsupported architecture {config.architecture}; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return entry
