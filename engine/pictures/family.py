"""The interface of a kind of picture model: encoders of prompts, and the step of a transformer.

:mod:`.flux_family` and :mod:`.zimage_family` implement it. The pipelines, the loading and the
memory limits know no kind by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from baton.proto.contexts.pixels import PixelContext

from ..kernels.backend import F32
from ..kernels.host_backend import PictureBackend
from ..loading.model_config import ModelConfig
from ..models.weights import Progress
from .configs import ModelPart

OpenPart = Callable[[str], ModelPart]
"""Opens the tensors of a part by the name of its folder."""


@dataclass(slots=True, frozen=True)
class EncodedPrompt:
    """What the steps need of a prompt.

    ``vectors``: float32 ``[T, text_width]``, one per token. ``pooled``: float32 ``[pooled_width]``,
    None if the family has none.
    """

    vectors: F32
    pooled: F32 | None = None


class TextEncoders(Protocol):
    """The loaded text encoders of a model. Not thread-safe."""

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer; its exceptions end the encoding."""
        ...

    def encode(self, request: PixelContext, prefix: str) -> EncodedPrompt:
        """Encode the prompt ("") or the negative prompt ("negative_") of a request.

        Raises InputError for missing tokens, and for token ids that the encoders do not have.
        """
        ...


@dataclass(slots=True, frozen=True, kw_only=True)
class StepInputs:
    """A batch of samples of one shape.

    Per sample, activations of the backend: ``latents`` ``[rows * columns, token_width]``, packed
    2x2 latents; ``prompts`` ``[T, text_width]`` and ``pooled`` ``[1, pooled_width]``, encoded
    texts; ``pooled`` is empty if the family has none. ``timesteps`` ``[B]``: 1000 sigma.
    ``guidance`` ``[B]``: ignored by models without guidance embedding. ``rows``, ``columns``: of
    latent tokens.
    """

    latents: Sequence[F32]
    prompts: Sequence[F32]
    pooled: Sequence[F32]
    timesteps: F32
    guidance: F32
    rows: int
    columns: int


class Transformer(Protocol):
    """A loaded transformer. Not thread-safe."""

    def watch(self, after_layer: Callable[[], None]) -> None:
        """Call ``after_layer`` after every layer; its exceptions end a step."""
        ...

    def release(self) -> None:
        """Free the arrays of the last call, as large as hundreds of megabytes."""
        ...

    def conditions(self, inputs: StepInputs) -> Sequence[F32]:
        """Return the arrays that :meth:`execute` uploads, in its order."""
        ...

    def execute(self, inputs: StepInputs) -> list[F32]:
        """Return the noise float32 ``[rows * columns, token_width]`` that each sample contains.

        A sample's bits do not depend on the other samples.
        """
        ...


class Guidance(Protocol):
    """How the noise of a prompt and the noise of a negative prompt become one."""

    def prefixes(self, request: PixelContext, level: float) -> tuple[str, ...]:
        """Return the prompts that a step needs: "", and perhaps "negative_".

        ``level``: sigma before the step, from 1 down to 0.
        """
        ...

    def combine(
        self, request: PixelContext, noise: F32, negative: F32, backend: PictureBackend
    ) -> F32:
        """Return the noise ``[tokens, token_width]`` of a step that needs both prompts.

        The result may be in the memory of an argument.
        """
        ...


class Family(Protocol):
    """One kind of picture model with the configs of a folder."""

    @property
    def architecture(self) -> str:
        """The pipeline's class in ``model_index.json``."""
        ...

    @property
    def encoder_parts(self) -> tuple[str, ...]:
        """Folders of the text encoders."""
        ...

    @property
    def text_width(self) -> int:
        """Numbers of a vector of a prompt."""
        ...

    @property
    def pooled_width(self) -> int:
        """Numbers of a prompt's pooled vector, 0 if there is none."""
        ...

    @property
    def token_width(self) -> int:
        """Numbers of a latent token, which is 2x2 latents as ``[channels, 2, 2]``."""
        ...

    @property
    def row_multiple(self) -> int:
        """The transformer pads text and image to multiples of so many rows."""
        ...

    @property
    def row_bytes(self) -> int:
        """Memory that a step of the transformer needs for each row, of text or image."""
        ...

    @property
    def configs(self) -> tuple[msgspec.Struct, ...]:
        """The configs of encoders and transformer, for the fingerprint."""
        ...

    @property
    def widths(self) -> Mapping[str, int]:
        """Widths of rows that a GPU's kernels read, by name for messages."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of a head of the transformer."""
        ...

    @property
    def decoder(self) -> ModelConfig | None:
        """The config of a text encoder that is a decoder, whose attention a GPU limits; or None."""
        ...

    @property
    def guidance(self) -> Guidance:
        """How a negative prompt takes effect."""
        ...

    def check_request(self, request: PixelContext) -> None:
        """Raise InputError for fields that do not fit this kind of model."""
        ...

    def check_size(self, texts: int, rows: int, columns: int) -> None:
        """Raise InputError for a prompt or picture beyond the positions of the transformer.

        ``texts``: tokens of a prompt. ``rows``, ``columns``: of latent tokens.
        """
        ...

    def load_encoders(
        self, part: OpenPart, backend: PictureBackend, on_progress: Progress | None
    ) -> TextEncoders:
        """Load the text encoders. Raises CheckpointError."""
        ...

    def load_transformer(
        self, part: OpenPart, backend: PictureBackend, on_progress: Progress | None
    ) -> Transformer:
        """Load the transformer. Raises CheckpointError."""
        ...
