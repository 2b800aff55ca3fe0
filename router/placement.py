"""Choosing the pair of workers for a request, or saying why there is none.

Invariant: a pin is honoured while its worker lives; afterwards only a request without
``pin="strict"`` may move. Pairs of workers that cannot reach each other are avoided while another
pair can serve the request. Nothing here changes a request's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..proto.errors import EndpointDead, EndpointDraining, EndpointUnknown, WorkerLost
from ..proto.hashing import block_hashes
from .config import PolicyConfig
from .pairs import FailedPairs
from .policy import NO_HASHES, Policy
from .registry import Registry, Worker
from .request import Request

Pair = tuple[Worker, Worker | None]
"""Prefill worker, decode worker; none is needed to embed."""


class Placement:
    """The policy applied to the registered workers."""

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
        """Restore the pin of a resumed request; a worker that is gone binds only a strict one."""
        if endpoint is None:
            return
        worker = self._registry.find(endpoint)
        if worker is not None:
            request.pin = (worker.role, endpoint)
        elif request.strict:
            raise WorkerLost(f"the request may not leave {endpoint}, which is not there")

    def choose(self, request: Request, now: float) -> Pair | None:
        """A pair of ready workers, or None when a side has none to offer now.

        Raises WorkerLost when the request may not leave a worker that is gone.
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
        """Which prefill workers can reach a decode worker, as far as is known.

        A request that has lost time to a failed pair does not try out another one.
        """
        works, trial = self.failed_pairs.works, not request.unreachable
        return lambda prefill: works(prefill, decode, now, trial=trial)

    def _reached(
        self, request: Request, prefills: Sequence[Worker], now: float
    ) -> Callable[[Worker], bool]:
        """Which decode workers one of the prefill workers can reach."""
        return lambda decode: any(map(self._reaching(request, decode, now), prefills))

    def all_failed(self, request: Request, now: float) -> bool:
        """Whether every pair that may serve the request is known to fail.

        Raises WorkerLost as :meth:`choose`.
        """
        if not self.failed_pairs.known or request.embeds:
            return False
        prefills = self._candidates(request, "prefill")
        decodes = self._candidates(request, "decode")
        reached = self._reached(request, prefills, now)
        return bool(prefills and decodes) and not any(map(reached, decodes))

    def placed(self, request: Request) -> None:
        """Count the request's work on its workers."""
        prefill, decode = request.prefill, request.decode
        hashes = request.hashes or NO_HASHES
        tokens = request.next
        if prefill is not None:
            request.prefill_cost = tokens
            prefill.outstanding += request.prefill_cost
            self._policy.placed(prefill, hashes, tokens)
        if decode is not None:
            request.decode_cost = tokens + request.remaining
            decode.outstanding += request.decode_cost
            self._policy.placed(decode, hashes, tokens)
        request.hashes = None  # kilobytes, and cheap to make again

    def forget(self, worker: Worker) -> None:
        """The worker is gone."""
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
        """Whether it waits only because other suspects run on the workers."""
        ready = all(self._registry.ready(role, request.pool) for role in request.roles)
        return request.suspect and ready

    def _pinned(self, request: Request, endpoint: str) -> list[Worker] | None:
        """The pinned worker, none while it is only busy, or None when the pin is void."""
        worker = self._registry.find(endpoint)
        if worker is not None and worker in self._registry.ready(worker.role):
            avoided = request.avoid and worker.incarnation in request.avoid
            return [] if avoided else [worker]
        if worker is not None and not worker.draining and (request.strict or not worker.hung_up):
            return []  # suspect: it returns, or is declared dead
        if request.strict:
            raise WorkerLost(f"the request may not leave {endpoint}, which takes no work any more")
        request.pin = None
        return None

    def _hashes(self, request: Request) -> Sequence[bytes]:
        size = self._config.block_tokens
        if not self._policy.wants_hashes or request.base < size or request.embeds:
            return NO_HASHES  # vectors leave no cache behind
        if request.hashes is None:
            tokens = request.context.tokens.array[: size * self._config.match_blocks]
            request.hashes = block_hashes(tokens, size, request.context.cache_salt.encode())
        return request.hashes


def _narrowed(
    request: Request, workers: Sequence[Worker], works: Callable[[Worker], bool]
) -> Sequence[Worker]:
    """The workers to choose from while pairs fail; all where nothing better is known.

    Of those that work, others than the request has failed with: which of the two was cut off,
    perhaps from everyone, nobody knows.
    """
    found = [worker for worker in workers if works(worker)] or workers
    return [worker for worker in found if worker.incarnation not in request.shunned] or found


def _has_suspect(worker: Worker, but: Request) -> bool:
    return any(request.suspect for request in worker.requests.values() if request is not but)
