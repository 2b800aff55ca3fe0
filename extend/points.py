"""The protocols of the extension points, and the facts that their methods are given.

Facts are copies: an extension cannot change the state of a router or worker. Times are in seconds,
lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from baton.runtime.metrics.families import Family


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker that may serve a request.

    ``name``: such as ``decode-0``. ``role``: ``prefill`` or ``decode``. ``host``: host of its
    address; empty on one machine without tcp. ``labels``: as the setting ``labels`` gives them.
    ``outstanding_tokens``: unfinished tokens that all routers have assigned to it.
    ``requests``: unfinished requests, the same. ``max_requests``: requests per step.
    ``cached_tokens``: leading tokens of this prompt that it has probably cached. ``kv_blocks``,
    ``kv_blocks_used``: blocks of its KV memory. ``step_s``: predicted seconds of its step.
    """

    name: str
    role: str
    host: str = ""
    pool: str = "default"
    labels: Mapping[str, str] = {}
    outstanding_tokens: int = 0
    requests: int = 0
    max_requests: int = 0
    cached_tokens: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    step_s: float = 0.0


class Placing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request for which a worker is chosen: first its decode worker, then its prefill worker.

    ``role``: of the workers to choose from. ``decode``: the decode worker chosen before, while a
    prefill worker is chosen; else None. ``prompt_tokens``: tokens to compute, with those that a
    replayed request has generated. ``max_new_tokens``: most tokens that it still generates.
    ``prefix``: digest of the first 32 tokens of its prompt, or of all if it has fewer, and of its
    cache salt; equal in all processes. ``cache_salt``: empty: none. ``router``: name of this
    router.
    """

    request_id: str
    role: str
    prompt_tokens: int
    max_new_tokens: int
    prefix: str = ""
    cache_salt: str = ""
    decode: WorkerFacts | None = None
    pool: str | None = None
    router: str = ""


class Policy(Protocol):
    """Chooses the workers of requests, in a router."""

    def choose(self, request: Placing, workers: Sequence[WorkerFacts]) -> WorkerFacts:
        """Return one of ``workers``, at least two, all of one role and ready for this request."""
        ...


class Ways(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The two ways of a request in mode adaptive, as the router predicts them.

    ``uncached_tokens``, ``waiting_tokens``: tokens of this prompt that the prefill worker has to
    compute, and tokens of the prompts before it. ``local_uncached_tokens``,
    ``local_waiting_tokens``: the same of the decode worker. ``seconds_per_token``: of a prompt, 0
    before the prefill worker has measured it. ``handoff_s``: from the first token to the end of the
    handoff. ``streams``: requests that generate at the decode worker; ``step_s``: seconds of its
    steps without prompt tokens; ``target_s``: of steps with a chunk. ``over_prefill_s``,
    ``local_s``: until the second and the first token. ``delays_streams``: no decode worker has time
    for a chunk within the target; ``local_s`` is infinite then. ``slo_ttft_s``: TTFT limit of the
    request, its own or the cluster's, 0 without one; ``slo_itl_s``: its own ITL limit, 0 without
    one. ``local``: the decision of Baton's own decider.
    """

    request_id: str
    prompt_tokens: int
    uncached_tokens: int
    local_uncached_tokens: int
    waiting_tokens: int = 0
    local_waiting_tokens: int = 0
    seconds_per_token: float = 0.0
    handoff_s: float = 0.0
    streams: int = 0
    step_s: float = 0.0
    target_s: float = 0.0
    over_prefill_s: float = 0.0
    local_s: float = math.inf
    delays_streams: bool = False
    slo_ttft_s: float = 0.0
    slo_itl_s: float = 0.0
    local: bool = False


class Decider(Protocol):
    """Decides which worker computes a prompt, in a router of mode adaptive."""

    def local(self, ways: Ways) -> bool:
        """Return True if the decode worker computes the prompt, False for the prefill worker."""
        ...


class Prompt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A prompt that waits at a prefill worker.

    ``prompt_tokens``: tokens to compute; ``cached_tokens``: leading ones that are cached now.
    ``generated_tokens``: tokens that the client has already, of a replayed request.
    ``asked_s``: when the client asked, by a clock of this worker; ``waited_s``: the seconds since.
    ``deadline_s``: until the request's deadline.
    ``slo_ttft_s``: its own limit, or the setting ``slo_ttft``. ``seconds_per_token``: as measured
    here, 0 before the first step.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int = 0
    asked_s: float = 0.0
    waited_s: float = 0.0
    deadline_s: float = math.inf
    slo_ttft_s: float = 0.0
    seconds_per_token: float = 0.0


class Order(Protocol):
    """Orders the waiting prompts of a prefill worker."""

    def rank(self, prompt: Prompt) -> float:
        """Return a number: prompts with smaller numbers start earlier, equal ones by arrival."""
        ...


class Ended(msgspec.Struct, frozen=True, gc=False):  # by position: a router makes one per request
    """A request that ended; None and empty texts are unknown.

    ``outcome``: finished, failed, cancelled, or moved to another router. ``way``: ``local``,
    ``handed_over``, or ``prefill`` if it ended at its prefill worker. ``finish_reason``: of a
    result; ``code``: of an error. ``seconds``: from its arrival to its end. ``queue_s``: until a
    worker began; ``ttft_s``: until the first token; ``itl_s``: mean time between tokens.
    ``slo_ttft_s``, ``slo_itl_s``: limits of its own; None: those of the cluster.
    ``transport``: of its handoff. ``attempts``: placements on workers.
    """

    request_id: str
    outcome: str
    way: str = ""
    finish_reason: str | None = None
    code: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    new_tokens: int | None = None
    seconds: float | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    prefill: str = ""
    decode: str = ""
    transport: str = ""
    attempts: int = 1


class Metric(Protocol):
    """Counts requests for the metrics of a router."""

    def ended(self, request: Ended) -> None:
        """Count a request that ended."""
        ...

    def families(self) -> Sequence[Family]:
        """Return the metrics for a scrape: :func:`counter`, :func:`gauge`, :func:`histogram`."""
        ...


class Transport(Protocol):
    """Moves payloads of KV blocks from prefill workers to decode workers."""

    def put(self, payload: memoryview) -> bytes:
        """Keep a payload, which is valid during this call only, and return a ticket for it."""
        ...

    def get(self, ticket: bytes, size: int) -> bytes | bytearray | memoryview:
        """Return the payload of ``size`` bytes, at the decode worker; called once per ticket."""
        ...


M = TypeVar("M")


class ModelFamily(Protocol):
    """Serves model folders of an architecture that Baton does not have, like one that it has."""

    def config(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the config.json of one of Baton's architectures, for the folder's ``raw``."""
        ...

    def decoder(self, raw: dict[str, Any], base: type[M]) -> type[M]:
        """Return the class of the model: ``base``, Baton's for that architecture, or a subclass."""
        ...
