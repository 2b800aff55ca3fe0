"""Events of the scheduler: what a step changed for each request."""

from __future__ import annotations

import msgspec

from baton.proto.contexts.outputs import TokenLogProbs


class EngineEvent(msgspec.Struct, frozen=True, gc=False):
    """Base of all events; ``request`` names the request as in :class:`.plan.Chunk`."""

    request: bytes


class TokenEvent(EngineEvent, frozen=True, gc=False):
    """A token was sampled; ``position`` is its index in the context.

    ``preview``: PNG of an unfinished picture. ``prompt_log_probs``: of the request's prompt, with
    the first token (:mod:`...proto.prompt_log_probs`).
    """

    position: int
    token: int
    logprobs: TokenLogProbs | None = None
    preview: bytes | None = None
    prompt_log_probs: bytes | None = None


class Finished(EngineEvent, frozen=True, gc=False):
    """The request ended and holds no blocks; ``status`` is a GenerationStatus value.

    ``result``: PNG of a picture.
    """

    status: str
    result: bytes | None = None


class Failed(EngineEvent, frozen=True, gc=False):
    """The request failed and holds no blocks; ``code`` is the code of a BatonError.

    ``cause``: an exception of the scheduler's own code, for the log.
    """

    code: str
    message: str
    cause: Exception | None = None


class ChunkDone(EngineEvent, frozen=True, gc=False):
    """The KV of the first ``num_computed_tokens`` tokens is valid; more of the prompt follows."""

    num_computed_tokens: int


class Prefilled(EngineEvent, frozen=True, gc=False):
    """Prefill mode: prompt computed, first token sampled; blocks are kept until ``release``."""


Event = TokenEvent | Finished | Failed | ChunkDone | Prefilled
