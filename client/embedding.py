"""Embeddings of many texts: a window of running requests, results in the order of the texts.

Invariant: at most :data:`WINDOW` requests run. The first failure ends the call and cancels the
running requests. A deadline applies to the whole call, so a request that starts later has less
time. This module uses no clock, thread or event loop. The clients start the requests that it
returns, and pass the ends of the requests to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from baton.proto.errors import DeadlineExceeded, InputError, InternalError, TaskMismatch
from baton.proto.requests import build_embed_context

from .events import Ended, RequestSpec
from .model import ServedModel, TokensOrText, encode, ids_of, make_spec
from .options import RequestOptions, batch_options, check_options

F32 = npt.NDArray[np.float32]
WINDOW = 256
"""Maximum running requests of a call; more would only wait in the cluster instead of here."""
_OPTIONS = frozenset(
    {
        "target_endpoint", "deadline", "pool", "pin", "fallback", "max_retries", "request_id",
        "traceparent", "gateway",
    }
)  # fmt: skip


def embed_specs(
    texts: Sequence[TokensOrText], options: RequestOptions, model: ServedModel
) -> list[RequestSpec]:
    """Make one request per text or token list. Raises InputError, TaskMismatch.

    If there are several texts, each request id is the one of the options with a number.
    """
    options = batch_options(check_options(options, _OPTIONS))
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        what = "one text" if isinstance(texts, str) else type(texts).__name__
        raise InputError(f"embed takes a list of texts, not {what}")
    if model.card.task != "embed":
        kind = "picture" if model.draws else "generation"
        raise TaskMismatch(
            f"{model.card.name!r} is a {kind} model; embeddings need an embedding model"
        )
    given = list(texts)
    name = options.get("request_id")
    names = [name and (f"{name}-{row}" if len(given) > 1 else name) for row in range(len(given))]
    return [_spec(text, options, model, own) for text, own in zip(given, names, strict=True)]


def _spec(
    text: TokensOrText, options: RequestOptions, model: ServedModel, name: str | None
) -> RequestSpec:
    tokens: Any = encode(text, model) if isinstance(text, str) else ids_of(text)
    wire = build_embed_context(tokens, model.card, target_endpoint=options.get("target_endpoint"))
    return make_spec(wire, options, name)


class Embedding:
    """One call of ``embed``: its requests and the embeddings received so far.

    ``size``: dimension of an embedding. ``began``: time of the call, in seconds of the caller's
    clock.
    """

    def __init__(self, specs: Sequence[RequestSpec], size: int, began: float = 0.0) -> None:
        self._began = began
        self._waiting: Iterator[RequestSpec] = iter(specs)
        self._rows: Mapping[str, int] = {spec.request_id: row for row, spec in enumerate(specs)}
        self._vectors = np.empty((len(specs), size), np.float32)
        self._left = len(specs)
        self.running: set[str] = set()

    @property
    def done(self) -> bool:
        """Whether all embeddings have arrived."""
        return not self._left

    def start(self, now: float = 0.0) -> list[RequestSpec]:
        """Return the requests to start now. Raises DeadlineExceeded after the call's deadline."""
        started = []
        while len(self.running) < WINDOW:
            spec = next(self._waiting, None)
            if spec is None:
                break
            if spec.deadline is not None:
                spec = self._with_time_left(spec, spec.deadline, now)
            self.running.add(spec.request_id)
            started.append(spec)
        return started

    def _with_time_left(self, spec: RequestSpec, deadline: float, now: float) -> RequestSpec:
        left = self._began + deadline - now
        if left <= 0:
            done = len(self._rows) - self._left
            raise DeadlineExceeded(
                f"the deadline of {deadline:g} s passed after {done} of {len(self._rows)} texts"
            )
        return replace(spec, deadline=left)

    def take(self, ended: Ended) -> None:
        """Store the embedding of an ended request. Raises the error of a failed request."""
        self.running.discard(ended.request_id)
        if ended.error is not None:
            raise ended.error
        vector = ended.embedding
        if vector is None or vector.shape != self._vectors.shape[1:]:
            raise InternalError(
                f"the router ended a request with {ended.status!r} and no embedding"
            )
        self._vectors[self._rows[ended.request_id]] = vector
        self._left -= 1

    @property
    def vectors(self) -> F32:
        """All embeddings, float32 ``[n, dim]``, in the order of the texts."""
        return self._vectors
