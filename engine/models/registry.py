"""The supported model architectures, by the ``architectures[0]`` of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.proto.contexts.speech import TTSContext
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.validators import (
    validate_aspect_ratio_args,
    validate_image_grid_thw_args,
)
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.errors import CheckpointError, InputError
from baton.proto.ids import RequestID
from baton.proto.wire.context_maps import context_to_run
from baton.proto.wire.wire_context import WireContext

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

Validator = Callable[[TextContext], None]


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
    the folder of an embedding model sets none. ``context``: class of its requests. ``validators``:
    functions that raise InputError for unsupported contexts. ``tokenizer``: file that converts text
    to token ids; clients read it, workers see only ids. ``speaks``: its tokens may be audio tokens,
    if the folder has a speech.json.
    """

    generator: type[Decoder] | None = None
    embedder: Embedder | None = None
    pooling: EmbeddingSettings = _MEAN
    context: type[TextContext] = TextContext
    validators: tuple[Validator, ...] = ()
    tokenizer: str = "tokenizer.json"
    speaks: bool = False

    @property
    def task(self) -> str:
        """Default task; the folder or the operator may choose another."""
        return EMBED if self.generator is None else GENERATE

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the contexts that the architecture takes."""
        return tuple(dict.fromkeys((TextContext.__name__, self.context.__name__)))


_CAUSAL = Architecture(
    generator=Decoder,
    embedder=_decoder_without_head,
    pooling=EmbeddingSettings("last", normalize=True),
    speaks=True,
)

_BODY = Architecture(
    embedder=_decoder_without_head, pooling=EmbeddingSettings("last", normalize=True)
)
"""A decoder without its head, as sentence-transformers saves one."""

_WITH_IMAGES = Architecture(
    generator=VisionDecoder,
    context=TextAndVisionContext,
    validators=(validate_image_grid_thw_args,),
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _CAUSAL,
    "MistralForCausalLM": _CAUSAL,
    "Qwen2ForCausalLM": _CAUSAL,
    "Qwen3ForCausalLM": _CAUSAL,
    GEMMA3: Architecture(generator=GemmaDecoder),
    PHI3: Architecture(generator=PhiDecoder),
    QWEN2_5_VL: _WITH_IMAGES,
    QWEN3_VL: _WITH_IMAGES,
    MLLAMA: Architecture(
        generator=CrossDecoder,
        context=TextAndVisionContext,
        validators=(validate_aspect_ratio_args,),
    ),
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


def read_context(
    architecture: str, wire: WireContext, request_id: RequestID, emitted: Sequence[int] = ()
) -> TextContext:
    """Convert a request into its model's context, checked by the model's validators.

    Raises InputError or ValueError if the context cannot be run.
    """
    entry = ARCHITECTURES.get(architecture, _PLAIN)
    kind = str(wire.__struct_config__.tag)
    kinds = (*entry.kinds, TTSContext.__name__) if entry.speaks else entry.kinds
    if kind not in kinds:  # a text context would silently omit the images of another kind
        raise InputError(f"{architecture} takes no {kind}, only {' and '.join(kinds)}")
    # Requests for text stay plain also where the model takes more; other kinds name their class.
    own = TextContext if entry.context is TextAndVisionContext else entry.context
    context = context_to_run(wire, request_id, emitted, own)
    for validate in entry.validators:
        validate(context)
    return context


_PLAIN = Architecture()
