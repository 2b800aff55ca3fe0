"""The supported model architectures, by the ``architectures[0]`` of a config.json.

:mod:`.contexts` has the kinds of their requests. Neither module imports a model class: a worker
imports the class that it serves, and a supervisor imports none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.proto.errors import CheckpointError

from ..kernels.backend import Backend
from ..loading.checkpoint import Checkpoint
from ..loading.embedding_config import EMBED, GENERATE, EmbeddingSettings
from ..loading.family_defaults import PHI3
from ..loading.gemma_config import GEMMA3
from ..loading.model_config import ModelConfig
from ..loading.tiled_config import MLLAMA
from ..loading.vision_config import QWEN2_5_VL, QWEN3_VL
from .weights import Progress

if TYPE_CHECKING:
    from .bert import BertModel
    from .decoder import Decoder


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
    make = _decoder()
    return make(checkpoint, backend, max_length, on_progress, block_size=block_size, head=False)


def _bert(
    checkpoint: Checkpoint,
    backend: Backend,
    max_length: int,
    on_progress: Progress | None,
    /,
    *,
    block_size: int,
) -> BertModel:
    from .bert import BertModel

    return BertModel(checkpoint, backend, max_length, on_progress, block_size=block_size)


def _decoder() -> type[Decoder]:
    from .decoder import Decoder

    return Decoder


def _gemma() -> type[Decoder]:
    from .gemma import GemmaDecoder

    return GemmaDecoder


def _phi() -> type[Decoder]:
    from .phi import PhiDecoder

    return PhiDecoder


def _vision() -> type[Decoder]:
    from .vision_decoder import VisionDecoder

    return VisionDecoder


def _cross() -> type[Decoder]:
    from .cross_decoder import CrossDecoder

    return CrossDecoder


_MEAN = EmbeddingSettings("mean", normalize=False)


@dataclass(slots=True, frozen=True, kw_only=True)
class Architecture:
    """One supported architecture.

    ``generator``: imports the model class that returns logits; None if there is no such class.
    ``embedder``: constructor of a model that returns hidden states, or None. ``pooling``: default
    for an embedding model whose folder does not set it. ``tokenizer``: file that converts text to
    token ids. Clients read it; workers receive token ids.
    """

    generator: Callable[[], type[Decoder]] | None = None
    embedder: Embedder | None = None
    pooling: EmbeddingSettings = _MEAN
    tokenizer: str = "tokenizer.json"

    @property
    def task(self) -> str:
        """Default task; the folder or the operator may choose another."""
        return EMBED if self.generator is None else GENERATE


_CAUSAL = Architecture(
    generator=_decoder,
    embedder=_decoder_without_head,
    pooling=EmbeddingSettings("last", normalize=True),
)

_BODY = Architecture(
    embedder=_decoder_without_head, pooling=EmbeddingSettings("last", normalize=True)
)
"""A decoder without its head, in the form that sentence-transformers saves."""

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _CAUSAL,
    "MistralForCausalLM": _CAUSAL,
    "Qwen2ForCausalLM": _CAUSAL,
    "Qwen3ForCausalLM": _CAUSAL,
    GEMMA3: Architecture(generator=_gemma),
    PHI3: Architecture(generator=_phi),
    QWEN2_5_VL: Architecture(generator=_vision),
    QWEN3_VL: Architecture(generator=_vision),
    MLLAMA: Architecture(generator=_cross),
    "BertModel": Architecture(embedder=_bert),
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
