"""What Baton knows of the ``architectures[0]`` of a config.json: one entry per name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...proto.context_maps import context_to_run
from ...proto.contexts import TextContext
from ...proto.errors import CheckpointError
from ...proto.ids import RequestID
from ...proto.requests import check_kind
from ...proto.wire import WireContext
from ..checkpoint import Checkpoint
from ..embedding_config import EMBED, GENERATE, EmbeddingSettings
from ..kernels.backend import Backend
from ..model_config import ModelConfig
from .bert import BertModel
from .decoder import Decoder
from .weights import Progress

Validator = Callable[[TextContext], None]


class Embedder(Protocol):
    """A constructor of models that give hidden states."""

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
    """One architecture.

    ``generator``: class of the model that gives logits, None for one that cannot.
    ``embedder``: makes one that gives hidden states, None for one that cannot. ``pooling``: of
    an embedder whose folder does not say. ``context``: class of its requests. ``validators``:
    raise InputError for a context it cannot take. ``tokenizer``: the file that turns text into
    its ids; clients read it, workers see ids alone.
    """

    generator: type[Decoder] | None = None
    embedder: Embedder | None = None
    pooling: EmbeddingSettings = _MEAN
    context: type[TextContext] = TextContext
    validators: tuple[Validator, ...] = ()
    tokenizer: str = "tokenizer.json"

    @property
    def task(self) -> str:
        """What it is for unless its folder or the operator says otherwise."""
        return EMBED if self.generator is None else GENERATE


_CAUSAL = Architecture(
    generator=Decoder,
    embedder=_decoder_without_head,
    pooling=EmbeddingSettings("last", normalize=True),
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _CAUSAL,
    "MistralForCausalLM": _CAUSAL,
    "Qwen2ForCausalLM": _CAUSAL,
    "Qwen3ForCausalLM": _CAUSAL,
    "BertModel": Architecture(embedder=BertModel),
}


def architecture_of(config: ModelConfig, origin: object) -> Architecture:
    """The entry of a checkpoint's architecture; CheckpointError, naming ``origin``, if none."""
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
    """A request as its model's context, checked by its validators.

    Raises InputError or ValueError for one that cannot be run.
    """
    check_kind(wire)  # a text context would leave the images of another kind out
    entry = ARCHITECTURES.get(architecture, _PLAIN)
    context = context_to_run(wire, request_id, emitted, entry.context)
    for validate in entry.validators:
        validate(context)
    return context


_PLAIN = Architecture()
