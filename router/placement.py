"""Choose the pair of workers for a request.

Invariant: a pinned request stays with its worker while the worker lives; after that it moves unless
its pin is strict. Failed pairs are avoided while another pair can serve the request. This module
never changes a request's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..proto.errors import EndpointDead, EndpointDraining, EndpointUnknown, WorkerLost
from ..proto.hashing import block_hashes
from .config import PolicyConfig
from .pairs import FailedPairs
from .policy import NO_HASHES, Policy
from .registry import Registry
from .requests import Request
from .workers import Worker

Pair = tuple[Worker, Worker | None]
"""Prefill worker and decode worker; a request for embeddings has no decode worker."""


class Placement:
    """Applies the policy to the registered workers."""

    def __init__(self, registry: Registry, policy: Policy, config: PolicyConfig) -> None:
        self._registry = registry
        self._policy = policy
        self._config = config
        self.failed_pairs = FailedPairs()

    def pin(self, request: Request, endpoint: str | None, *, fallback: bool) -> None:
        """Resolve ``target_endpoint`` at admission.

        Raises EndpointUnknown, EndpointDead or EndpointDraining unless ``fallback``.
        """
        if endpoint is None:
            return
        try:
            worker = self._registry.resolve(endpoint)
        except (EndpointUnknown, EndpointDead, EndpointDraining):
            if not fallback:
                raise
            return
        request.pin = (worker.role, endpoint)

    def repin(self, request: Request, endpoint: str | None) -> None:
        """Restore the pin of a resumed request; raises WorkerLost if a strict pin cannot hold."""
        if endpoint is None:
            return
        worker = self._registry.find(endpoint)
        if worker is not None:
            request.pin = (worker.role, endpoint)
        elif request.strict:
            raise WorkerLost(f"strict pin to {endpoint}: no such worker is registered")

    def choose(self, request: Request, now: float) -> Pair | None:
        """Return a pair of ready workers, or None while a role has no candidate.

        Raises WorkerLost if the request has a strict pin to a lost worker.
        """
        decodes = None if request.embeds else self._candidates(request, "decode")
        prefills = self._candidates(request, "prefill")
        if decodes == [] or not prefills:
            return None
        hashes = self._hashes(request)
        if not decodes:
            return self._policy.choose(prefills, hashes), None
        if not self.failed_pairs.known:
            decode = self._policy.choose(decodes, hashes)
            return self._policy.choose(prefills, hashes), decode
        reached = self._reached(request, prefills, now)
        decode = self._policy.choose(_narrowed(request, decodes, reached), hashes)
        reaching = self._reaching(request, decode, now)
        prefill = self._policy.choose(_narrowed(request, prefills, reaching), hashes)
        self.failed_pairs.placed(prefill, decode, now)
        return prefill, decode

    def _reaching(self, request: Request, decode: Worker, now: float) -> Callable[[Worker], bool]:
        """Return a predicate: True for a prefill worker that can reach ``decode``.

        A request that a failed pair has delayed is not used for a trial of another failed pair.
        """
        works, trial = self.failed_pairs.works, not request.unreachable
        return lambda prefill: works(prefill, decode, now, trial=trial)

    def _reached(
        self, request: Request, prefills: Sequence[Worker], now: float
    ) -> Callable[[Worker], bool]:
        """Return a predicate: True for a decode worker that one of ``prefills`` can reach."""
        return lambda decode: any(map(self._reaching(request, decode, now), prefills))

    def all_failed(self, request: Request, now: float) -> bool:
        """True if every pair that may serve the request is a failed pair.

        Raises WorkerLost as :meth:`choose`.
        """
        if not self.failed_pairs.known or request.embeds:
            return False
        prefills = self._candidates(request, "prefill")
        decodes = self._candidates(request, "decode")
        reached = self._reached(request, prefills, now)
        return bool(prefills and decodes) and not any(map(reached, decodes))

    def placed(self, request: Request) -> None:
        """Add the request's tokens to the load of its workers."""
        attempt = request.attempt
        prefill, decode = attempt.prefill, attempt.decode
        hashes = request.hashes
        tokens = request.next
        if prefill is not None:
            attempt.prefill_cost = tokens
            prefill.outstanding += tokens
            if hashes:
                self._policy.placed(prefill, hashes, tokens)
        if decode is not None:
            attempt.decode_cost = tokens + request.remaining
            decode.outstanding += attempt.decode_cost
            if hashes:
                self._policy.placed(decode, hashes, tokens)
        request.hashes = None  # kilobytes of memory, cheap to compute again

    def forget(self, worker: Worker) -> None:
        """Drop the state of a dead worker."""
        self._policy.forget(worker)
        self.failed_pairs.forget(worker)

    def _candidates(self, request: Request, role: str) -> list[Worker]:
        if request.pin is not None and request.pin[0] == role:
            pinned = self._pinned(request, request.pin[1])
            if pinned is not None:
                return pinned
        workers = self._registry.ready(role, request.pool)
        if (request.deaths or request.doubts) and request.suspect:
            workers = [worker for worker in workers if not _has_suspect(worker, request)]
        avoid = request.avoid
        if avoid:
            workers = [worker for worker in workers if worker.incarnation not in avoid]
        return workers

    def kept_apart(self, request: Request) -> bool:
        """True if a poison suspect waits only because other suspects run on the workers."""
        ready = all(self._registry.ready(role, request.pool) for role in request.roles)
        return request.suspect and ready

    def _pinned(self, request: Request, endpoint: str) -> list[Worker] | None:
        """Return the pinned worker, no worker while it is busy or suspect, None for a void pin."""
        worker = self._registry.find(endpoint)
        if worker is not None and worker in self._registry.ready(worker.role):
            avoided = request.avoid and worker.incarnation in request.avoid
            return [] if avoided else [worker]
        if worker is not None and not worker.draining and (request.strict or not worker.hung_up):
            return []  # suspect: wait until the worker returns or is declared dead
        if request.strict:
            raise WorkerLost(f"strict pin to {endpoint}: the worker takes no new requests")
        request.pin = None
        return None

    def _hashes(self, request: Request) -> Sequence[bytes]:
        size = self._config.block_tokens
        if not self._policy.wants_hashes or request.base < size or request.embeds:
            return NO_HASHES  # embeddings leave no prefix cache
        if request.hashes is None:
            tokens = request.context.tokens.array[: size * self._config.match_blocks]
            request.hashes = block_hashes(tokens, size, request.context.cache_salt.encode())
        return request.hashes


def _narrowed(
    request: Request, workers: Sequence[Worker], works: Callable[[Worker], bool]
) -> Sequence[Worker]:
    """Return the workers that have a working pair, or else all workers.

    Prefer workers with which the request has not failed: either worker of a failed pair may be
    cut off, perhaps from every worker.
    """
    found = [worker for worker in workers if works(worker)] or workers
    return [worker for worker in found if worker.incarnation not in request.shunned] or found


def _has_suspect(worker: Worker, but: Request) -> bool:
    return any(request.suspect for request in worker.requests.values() if request is not but)
