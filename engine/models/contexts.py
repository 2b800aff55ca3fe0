"""The contexts that each architecture takes, by the ``architectures[0]`` of a config.json.

Workers read requests with this table; it imports no model, so neither do their cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.proto.contexts.speech import TTSContext
from baton.proto.contexts.text import TextContext
from baton.proto.contexts.validators import (
    validate_aspect_ratio_args,
    validate_image_grid_thw_args,
)
from baton.proto.contexts.vision import TextAndVisionContext
from baton.proto.errors import InputError
from baton.proto.ids import RequestID
from baton.proto.wire.context_maps import context_to_run
from baton.proto.wire.wire_context import WireContext

from ..loading.tiled_config import MLLAMA
from ..loading.vision_config import QWEN2_5_VL, QWEN3_VL

Validator = Callable[[TextContext], None]


@dataclass(slots=True, frozen=True, kw_only=True)
class Contexts:
    """The requests of an architecture.

    ``context``: their class. ``validators``: functions that raise InputError for contexts that the
    model cannot run. ``speaks``: tokens may be audio tokens, if the folder has a speech.json.
    """

    context: type[TextContext] = TextContext
    validators: tuple[Validator, ...] = ()
    speaks: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the contexts, without those of speech."""
        return tuple(dict.fromkeys((TextContext.__name__, self.context.__name__)))


_SPEECH = Contexts(speaks=True)
_IMAGES = Contexts(context=TextAndVisionContext, validators=(validate_image_grid_thw_args,))

CONTEXTS: dict[str, Contexts] = {
    "LlamaForCausalLM": _SPEECH,
    "MistralForCausalLM": _SPEECH,
    "Qwen2ForCausalLM": _SPEECH,
    "Qwen3ForCausalLM": _SPEECH,
    QWEN2_5_VL: _IMAGES,
    QWEN3_VL: _IMAGES,
    MLLAMA: Contexts(context=TextAndVisionContext, validators=(validate_aspect_ratio_args,)),
}
"""The architectures that take more than text."""
_TEXT = Contexts()


def contexts_of(architecture: str) -> Contexts:
    """Return the contexts of an architecture."""
    return CONTEXTS.get(architecture, _TEXT)


def read_context(
    architecture: str, wire: WireContext, request_id: RequestID, emitted: Sequence[int] = ()
) -> TextContext:
    """Convert a request into its model's context, checked by the model's validators.

    Raises InputError or ValueError if the context cannot be run.
    """
    entry = contexts_of(architecture)
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
