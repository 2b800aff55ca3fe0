"""Choose the pair of workers for a request.

Invariant: a pinned request stays with its worker while the worker lives; after that it moves unless
its pin is strict. Failed pairs are avoided while another pair can serve the request. This module
never changes a request's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from baton.proto.errors import (
    EndpointDead,
    EndpointDraining,
    EndpointUnknown,
    FeatureMissing,
    WorkerLost,
)
from baton.proto.requests import needed_features
from baton.proto.wire.messages import HandoffReport
from baton.proto.work import prefix_hashes
from baton.runtime.liveness import HEARTBEAT_S

from .config import RouterConfig
from .pairs import FailedPairs
from .records import Chosen, Preference, Request, Route, Worker

NO_HASHES: Sequence[bytes] = ()
NO_PREFILL = "no prefill worker was ready"
PREDICTED = "predicted first token"
"""What chooses the worker of a way in mode adaptive."""
HEARD_S = 2.5 * HEARTBEAT_S
"""A request that is placed again prefers workers that sent a message in these last seconds."""
Pair = tuple[Worker | None, Worker | None]
"""Prefill worker and decode worker. A request for embeddings has no decode worker, a local request
no prefill worker."""


class Workers(Protocol):
    """What the placement asks about workers; :class:`.registry.Registry` has the answers."""

    uneven: bool
    """Whether a live worker has a shorter context length than the served model."""

    def find(self, name: str) -> Worker | None:
        """Return a live worker by id or endpoint, or None."""
        ...

    def resolve(self, endpoint: str) -> Worker:
        """Return the worker of a ``target_endpoint``, or raise the reason why it takes none."""
        ...

    def live(self) -> list[Worker]:
        """Return all live workers."""
        ...

    def ready(self, role: str, pool: str | None = None) -> list[Worker]:
        """Return the workers of a role (and pool) that take new requests."""
        ...

    def missing(self, roles: Sequence[str], pool: str | None = None) -> list[str]:
        """Return the roles that lack a ready worker."""
        ...


class Policy(Protocol):
    """What the placement asks a policy; :class:`baton.extend.Policy` is the one of users' own."""

    wants_hashes: bool
    """True if the policy needs block hashes of the prompt."""

    @property
    def begin(self) -> Callable[[Request], None] | None:
        """Sets the request of the next choices; None for a policy of Baton's own."""
        ...

    margin: Preference
    """By how much :meth:`choose` preferred its last worker; None without an alternative or cost."""

    def choose(self, workers: Sequence[Worker], hashes: Sequence[bytes]) -> Worker:
        """Return one of ``workers`` (not empty, all of one role) for a prompt with these blocks."""
        ...

    def cached(self, worker: Worker, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks the worker has probably cached; 0 if not known."""
        ...

    def placed(self, worker: Worker, hashes: Sequence[bytes], tokens: int) -> int:
        """Note that ``worker`` got a request with these blocks and ``tokens`` of work.

        Returns how many leading tokens the worker has probably cached; 0 if not known.
        """
        ...

    def forget(self, worker: Worker) -> None:
        """Drop the state of a dead worker."""


class Way(NamedTuple):
    """The workers of a request in mode adaptive, and why; a local request has no ``prefill``.

    ``candidates``: number of workers among which the way's new worker was chosen. ``late``: the
    request is expected to miss its TTFT limit.
    """

    prefill: Worker | None
    decode: Worker
    why: str
    candidates: int
    late: bool = False


class Decider(Protocol):
    """What the placement asks about the way of a request; :class:`.decider.Decider` decides."""

    always: bool
    """Whether every request is local, so that no prefill worker is looked for."""
    compares: bool
    """Whether both ways of a request are compared (:meth:`way`)."""

    def alone(
        self, request: Request, decodes: list[Worker], *, prefill: bool
    ) -> tuple[list[Worker], str]:
        """Return the decode workers that may serve the request alone, and why, or none."""
        ...

    def way(
        self,
        request: Request,
        prefills: Sequence[Worker],
        decodes: Sequence[Worker],
        pair: tuple[Worker, Worker],
        uncached: Callable[[Worker], int],
        now: float,
    ) -> Way:
        """Return the better way; ``pair``: the workers that the policy chose."""
        ...

    def learn(self, report: HandoffReport) -> None:
        """Learn from the report of a finished handoff."""


class Placement:
    """Applies a policy and a decider to the registered workers."""

    def __init__(
        self, workers: Workers, config: RouterConfig, policy: Policy, decider: Decider
    ) -> None:
        self._registry = workers
        self._config = config.policy
        self._policy = policy
        self._begin = policy.begin
        self._decider = decider
        self.failed_pairs = FailedPairs()
        self._margins: tuple[Preference, Preference] = (None, None)  # of the last pair
        self._why = ""  # the last pair takes its way
        self._late = False  # the last pair is expected to serve the request late

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

        Raises WorkerLost if the request has a strict pin to a lost worker, FeatureMissing for a
        parameter that no worker of a role reads.
        """
        if self._begin is not None:
            self._begin(request)
        special = request.deaths or request.doubts or request.avoid or request.past
        plain = request.pin is None and not self._registry.uneven
        if plain and not special and not needed_features(request.context):
            ready, pool = self._registry.ready, request.pool  # as _candidates would find
            decodes = None if request.embeds else ready("decode", pool)
            prefills = ready("prefill", pool)
        else:
            decodes = None if request.embeds else self._candidates(request, "decode", now)
            prefills = self._candidates(request, "prefill", now)
        always = self._decider.always and decodes is not None  # embeddings need a prefill worker
        if decodes == [] or not prefills or always:
            if not decodes or (prefills and not always):
                return None
            return self._alone(request, decodes)
        self._why, self._late = "", False
        policy = self._policy
        short = request.base < self._config.block_tokens
        hashes = NO_HASHES if short else self._hashes(request)
        if not decodes:
            prefill = policy.choose(prefills, hashes)
            self._margins = policy.margin, None
            return prefill, None
        if not self.failed_pairs.known:
            decode = policy.choose(decodes, hashes)
            margin = policy.margin
            prefill = policy.choose(prefills, hashes)
            self._margins = policy.margin, margin
            if self._decider.compares:
                return self._compared(request, prefills, decodes, (prefill, decode), hashes, now)
            return prefill, decode
        reached = self._reached(request, prefills, now)
        decode = policy.choose(_narrowed(request, decodes, reached), hashes)
        margin = policy.margin
        reaching = self._reaching(request, decode, now)
        near = _narrowed(request, prefills, reaching)
        prefill = policy.choose(near, hashes)
        self._margins = policy.margin, margin
        pair: Pair = prefill, decode
        if self._decider.compares:
            pair = self._compared(request, near, decodes, (prefill, decode), hashes, now)
        if pair[0] is not None:
            self.failed_pairs.placed(pair[0], decode, now)
        return pair

    def _compared(
        self,
        request: Request,
        prefills: Sequence[Worker],
        decodes: Sequence[Worker],
        pair: tuple[Worker, Worker],
        hashes: Sequence[bytes],
        now: float,
    ) -> Pair:
        """Return the way that mode adaptive prefers; ``pair``: the choice of the policy."""
        size, cached, tokens = self._config.block_tokens, self._policy.cached, request.next

        def uncached(worker: Worker) -> int:
            return max(1, tokens - size * cached(worker, hashes))

        if self._begin is not None:  # else a faster way would replace a user's choice
            prefills, decodes = pair[:1], pair[1:]
        if request.pin is not None:
            prefills = pair[:1] if request.pin[0] == "prefill" else prefills
        way = self._decider.way(request, prefills, decodes, pair, uncached, now)
        self._why = way.why
        if way.prefill is None:
            same = way.decode is pair[1]
            self._margins = None, self._margins[1] if same else _predicted(way.candidates)
        else:
            self._late = way.late
            if way.prefill is not pair[0]:
                self._margins = _predicted(way.candidates), self._margins[1]
        return way.prefill, way.decode

    def _alone(self, request: Request, decodes: list[Worker]) -> Pair | None:
        """Return a decode worker that computes the prompt too, or None to wait."""
        ready = bool(self._registry.ready("prefill", request.pool))
        alone, self._why = self._decider.alone(request, decodes, prefill=ready)
        if not alone:
            return None
        self._late = False
        short = request.base < self._config.block_tokens
        hashes = NO_HASHES if short else self._hashes(request)
        decode = self._policy.choose(alone, hashes)
        self._margins = None, self._policy.margin
        return None, decode

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
        prefills = self._candidates(request, "prefill", now)
        decodes = self._candidates(request, "decode", now)
        reached = self._reached(request, prefills, now)
        return bool(prefills and decodes) and not any(map(reached, decodes))

    def placed(self, request: Request, now: float) -> Route:
        """Add the request's tokens to the load of the workers chosen last; return why."""
        attempt, hashes, tokens = request.attempt, request.hashes, request.next
        prefill, decode = attempt.prefill, attempt.decode
        load = cached = decode_load = decode_cached = 0
        if prefill is not None:
            load = prefill.outstanding + prefill.others
            attempt.prefill_cost = tokens
            prefill.outstanding += tokens
            if hashes:
                cached = self._policy.placed(prefill, hashes, tokens)
        if decode is not None:
            decode_load = decode.outstanding + decode.others
            left = request.remaining if request.emitted else request.max_new
            attempt.decode_cost = cost = tokens + left * request.work.rows
            decode.outstanding += cost
            if hashes:
                decode_cached = self._policy.placed(decode, hashes, tokens)
        if self._decider.compares and not request.started:
            found = cached if prefill is not None else decode_cached
            attempt.count_prompt(max(0, tokens - found), now, late=self._late)
        request.hashes = None  # kilobytes of memory, cheap to compute again
        pinned = "" if request.pin is None else request.pin[0]
        margin, decode_margin = self._margins
        why = self._why
        return pinned, load, cached, margin, decode_load, decode_cached, decode_margin, why

    def forget(self, worker: Worker) -> None:
        """Drop the state of a dead worker."""
        self._policy.forget(worker)
        self.failed_pairs.forget(worker)

    def _candidates(self, request: Request, role: str, now: float) -> list[Worker]:
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
        if self._registry.uneven:
            length = request.context.end_length
            workers = [worker for worker in workers if worker.card.max_length >= length]
        needs = needed_features(request.context)
        if needs:
            workers = self._able(request, role, workers, needs)
        if not request.past:
            return workers
        # Its last worker is lost or suspect: another one of the same host may be lost too.
        return [worker for worker in workers if now - worker.seen_at <= HEARD_S] or workers

    def _able(
        self, request: Request, role: str, workers: list[Worker], needs: Sequence[str]
    ) -> list[Worker]:
        """Return the workers with the features that a request needs.

        Raises FeatureMissing if no live worker has them and the request has not been placed yet;
        a placed request waits for a successor of its worker.
        """
        able = [worker for worker in workers if worker.has(needs)]
        if able or request.attempt.number > request.own:
            return able
        live = [worker for worker in self._registry.live() if worker.role == role]
        if request.pool is not None:
            live = [worker for worker in live if worker.pool == request.pool]
        if live and not any(worker.has(needs) for worker in live):
            raise FeatureMissing(f"{needs[0]} needs newer {role} workers than the cluster has")
        return able

    def kept_apart(self, request: Request) -> bool:
        """True if a poison suspect waits only because other suspects run on the workers."""
        return request.suspect and not self._registry.missing(request.roles, request.pool)

    def _pinned(self, request: Request, endpoint: str) -> list[Worker] | None:
        """Return the pinned worker, no worker while it is busy or suspect, None for a void pin."""
        worker = self._registry.find(endpoint)
        if worker is not None and worker in self._registry.ready(worker.role):
            needs = needed_features(request.context)
            if not worker.has(needs):
                raise FeatureMissing(f"{needs[0]} needs a newer worker than {worker.id}")
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
        if not self._policy.wants_hashes or request.embeds:
            return NO_HASHES  # embeddings leave no prefix cache
        if request.hashes is None:
            request.hashes = prefix_hashes(request.context, size, self._config.match_blocks)
        return request.hashes


def _predicted(candidates: int) -> Preference:
    """Return why mode adaptive chose one of so many workers; None for the only one."""
    return Chosen(PREDICTED, candidates) if candidates > 1 else None


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
