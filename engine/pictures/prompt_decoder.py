"""A decoder as a text encoder: the states of a prompt before the decoder's last layer."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from baton.proto.errors import InputError
from baton.proto.limits import MAX_PICTURE_PROMPT_TOKENS
from baton.proto.sampling import SamplingParamsGenerationConfigDefaults

from ..kernels.backend import F32
from ..kernels.host_backend import PictureBackend
from ..loading.checkpoint import Checkpoint
from ..loading.generation_config import GenerationConfig
from ..loading.model_config import ModelConfig
from ..models.decoder import Decoder
from ..models.weights import Progress, WeightLoader
from ..pipeline.model import ModelInputs, lay_out, shared_layers
from ..scheduling.plan import Chunk
from .clip import check_vocabulary
from .configs import ModelPart, no_watch

PROMPT_BLOCK_SIZE = 16
"""Tokens of a block of the keys and values of a prompt."""


class PromptDecoder:
    """A decoder without its last layer and its head. Not thread-safe.

    ``config``: of the whole decoder, of at least two layers.
    """

    def __init__(
        self,
        part: ModelPart,
        config: ModelConfig,
        backend: PictureBackend,
        on_progress: Progress | None = None,
    ) -> None:
        self._config, self._backend = config, backend
        self._after_layer: Callable[[], None] = no_watch
        generation = GenerationConfig(
            eos_token_ids=(), defaults=SamplingParamsGenerationConfigDefaults()
        )
        checkpoint = Checkpoint(part.folder, _without_last(config), generation, part.tensors)
        self._decoder = _EarlyStates(
            checkpoint, backend, MAX_PICTURE_PROMPT_TOKENS, on_progress,
            block_size=PROMPT_BLOCK_SIZE, head=False,
        )  # fmt: skip
        layout = self._decoder.kv_layout
        blocks = layout.blocks_for(MAX_PICTURE_PROMPT_TOKENS)
        self._table = np.arange(blocks, dtype=np.int32)
        if backend.on_host:  # keys and values are read by their own layer alone
            self._pool = shared_layers(layout, blocks)
        else:
            self._pool = self._decoder.load_kv_manager(
                backend, blocks * layout.block_bytes * layout.num_layers
            ).pool

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer; its exceptions end the encoding."""
        self._after_layer = after_layer

    def states(self, text: npt.NDArray[np.int32]) -> F32:
        """Return the states ``[T, hidden]`` of a text ``[T]`` before the last layer, not normed.

        Raises InputError for an empty or long text, and for a token outside the vocabulary.
        """
        limit = MAX_PICTURE_PROMPT_TOKENS
        if not 0 < len(text) <= limit:
            raise InputError(f"a prompt has 1 to {limit} tokens, not {len(text)}")
        check_vocabulary(text, self._config.vocab_size)
        inputs = lay_out([Chunk(b"", 0, text, self._table)], self._pool)
        inputs.logit_rows = np.arange(len(text), dtype=np.int32)
        inputs.layer_done = lambda _: self._after_layer()
        states = self._decoder.execute(inputs).hidden_states
        if states is None:
            raise InputError("the text encoder returned no states")
        return self._backend.download(states).copy()


def _without_last(config: ModelConfig) -> ModelConfig:
    kept = config.num_layers - 1
    return msgspec.structs.replace(config, num_layers=kept, windows=config.windows[:kept])


class _EarlyStates(Decoder):
    """A decoder whose result is what its last layer adds to, instead of normed states."""

    def _load_more(self, loader: WeightLoader, checkpoint: Checkpoint) -> None:
        base = self._prefix(checkpoint, head=False)
        loader.unused.append(f"{base}layers.{checkpoint.config.num_layers}.")

    def _states(self, inputs: ModelInputs, wanted: ModelInputs) -> F32:
        return self._run_layers(inputs, wanted)[0]
