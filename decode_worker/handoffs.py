"""The conversation of a decode worker with prefill workers, from Open to the end of a grant.

Invariants: only an attempt that a router assigned to the sender, for handoff to this worker,
reserves blocks or releases them; a grant obeys only the key that reserved it; while draining,
nothing new is reserved; both sides agree on version, model and transport before blocks are
reserved. Pure: the receiver has the state of the grants.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.cache.paged_cache import Allocation, PagedCache
from baton.engine.grammar.constraint import GrammarTask
from baton.engine.scheduling.scheduler import Scheduler
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_grants import Output as Received
from baton.proto.errors import VersionMismatch
from baton.proto.layout import KVLayout, frame_layout
from baton.proto.limits import MAX_NAMED_BYTES, PROTOCOL_VERSION
from baton.proto.wire.messages import (
    DEVICE,
    SHARED,
    STREAMED,
    Aborted,
    Busy,
    Commit,
    Fence,
    GrantRef,
    Message,
    Open,
    Opened,
    OpenRefused,
    Ping,
    Pong,
    Probe,
    ProbeReply,
    Rejected,
    Release,
    Released,
    Reserve,
    Stale,
)
from baton.proto.wire.proofs import Holder
from baton.proto.wire.versions import check_version
from baton.worker.events import Log
from baton.worker.membership import Allowance, Membership

from .events import (
    Action,
    FrameStored,
    FromPeer,
    HandoffEvent,
    MapPool,
    PeerGone,
    PoolMapped,
    ToPeer,
)
from .grammars import Grammars

Output = Received[Allocation] | Action
"""The receiver's outputs are for the core, actions for the shell."""


class GrantStore:
    """The receiver's view of the paged cache.

    A handoff delivers the KV of all its tokens, including the prompt's last block. The cache
    reserves one token more: the token whose KV this worker computes first.
    """

    def __init__(self, cache: PagedCache, scheduler: Scheduler) -> None:
        self._cache = cache
        self._scheduler = scheduler

    def reserve(
        self, hashes: Sequence[bytes], num_tokens: int, growth: int, key: bytes
    ) -> Allocation | None:
        """Reserve blocks for the tokens and their growth, or return None.

        Cached blocks are shared only among handoffs from one ``key``: the KV of another key's
        worker may be false, and its hashes too.

        Preempted requests wait for blocks too and come first: their need is added.
        """
        wanted = self._cache.blocks_for(num_tokens + growth) + self._scheduler.blocks_wanted
        if self._scheduler.blocks_wanted and wanted > self._cache.pool.available:
            return None
        return self._cache.reserve(hashes, num_tokens + 1, max(0, growth - 1), key)

    def free(self, allocation: Allocation) -> None:
        """Free blocks that this worker has not computed on. Cached blocks stay cached."""
        self._cache.free(allocation)


class Handoffs:
    """Answers prefill workers; passes what concerns grants to the receiver.

    ``data_endpoint``: address for KV frames. ``max_frame_bytes``: largest frame accepted there.
    """

    def __init__(
        self,
        member: Membership,
        receiver: Receiver[Allocation],
        grammars: Grammars,
        data_endpoint: str,
        max_frame_bytes: int,
    ) -> None:
        self._member = member
        self._receiver = receiver
        self._grammars = grammars
        self._data_endpoint = data_endpoint
        self._max_frame_bytes = max_frame_bytes
        self._in_place: set[bytes] = set()  # peers whose GPU's blocks this worker reads
        self._layouts: dict[bytes, KVLayout] = {}  # by peer, of frames of another type

    def handle(self, event: HandoffEvent, now: float) -> list[Output]:
        """Handle an event of a prefill worker's connection."""
        match event:
            case FromPeer(peer=peer, message=message, key=key):
                self._receiver.contacts.heard(peer, now)
                return self._hear(peer, message, key, now)
            case PeerGone(peer=peer):
                self._receiver.contacts.gone(peer, now)
                self._in_place.discard(peer)
                self._layouts.pop(peer, None)
                return []
            case FrameStored():
                return self._stored(event, now)
            case PoolMapped():
                return self._mapped(event)

    def _hear(self, peer: bytes, message: Message, key: bytes, now: float) -> list[Output]:
        receiver = self._receiver
        match message:
            case Reserve():
                return self._reserve(peer, message, key, now)
            case Commit():
                if self._is_anothers(message.grant, key):
                    stale = Stale(
                        grant=message.grant, request=message.request, attempt=message.attempt
                    )
                    return [ToPeer(peer, stale)]
                return [*receiver.on_commit(peer, message, now, key=key)]
            case Release():
                if self._allowance(message, key, now) is None and not self._owns(message, key):
                    # The sender has no grant for this attempt, and must not end another's.
                    gone = Released(request=message.request, attempt=message.attempt)
                    return [ToPeer(peer, gone)]
                return [*receiver.on_release(peer, message, now)]
            case Fence():
                if self._is_anothers(message.grant, key):
                    return []
                return [*receiver.on_fence(message)]
            case Open():
                return [self._open(peer, message, key)]
            case Probe(nonce=nonce):
                return [ToPeer(peer, self._probe(nonce))]
            case Ping(nonce=nonce):
                return [ToPeer(peer, Pong(nonce=nonce))]
            case _:
                return []

    # ------------------------------------------------------------------ grants

    def _reserve(self, peer: bytes, message: Reserve, key: bytes, now: float) -> list[Output]:
        allowed = self._allowance(message, key, now)
        if allowed is None:
            return [ToPeer(peer, self._uninvited(message))]
        if message.num_tokens + message.growth > allowed.tokens:
            return [ToPeer(peer, self._refused(message, "peer_too_much"))]
        if self._member.draining and not self._receiver.holds(message):
            return [ToPeer(peer, _busy(message, "draining"))]
        in_place = peer in self._in_place
        until = now + min(message.deadline, allowed.seconds)
        outputs = self._receiver.on_reserve(
            peer,
            message,
            now,
            key=key,
            in_place=in_place,
            until=until,
            layout=self._layouts.get(peer),
        )
        return [*outputs, *self._prepare(message)]

    def _allowance(self, message: Reserve | Release, key: bytes, now: float) -> Allowance | None:
        """Return what the sender may reserve; None if no router assigned it this attempt."""
        holder, name = Holder(message.incarnation, key), (message.request, message.attempt)
        return self._member.allowance(*name, holder, message.ticket, now)

    def _uninvited(self, message: Reserve) -> Message:
        """Return the answer to a Reserve without a valid ticket; nothing is reserved.

        Aborted makes an honest sender return the attempt to its router. The ticket may be for an
        earlier incarnation of this worker, which has been restarted since.
        """
        if not self._member.can_check:
            return _busy(message, "this worker is not registered with a router yet")
        return self._refused(message, "peer_uninvited")

    def _refused(self, message: Reserve, why: str) -> Message:
        self._member.dropped[why] += 1
        return Aborted(request=message.request, attempt=message.attempt)

    def _owns(self, message: Release, key: bytes) -> bool:
        """True if the sender has a live grant for the attempt."""
        owner = self._receiver.owner_of_attempt(message.request, message.attempt)
        return owner == Holder(message.incarnation, key)

    def _is_anothers(self, grant: GrantRef, key: bytes) -> bool:
        """True, and counted, if a connection with another key reserved this grant."""
        owner = self._receiver.owner(grant)
        if owner is None or owner.key == key:
            return False
        self._member.dropped["peer_anothers_grant"] += 1
        return True

    def _prepare(self, message: Reserve) -> list[Action]:
        """Compile the request's grammar while its KV is computed and transferred."""
        spec = message.grammar
        if spec is None or not self._receiver.holds(message):
            return []
        task = GrammarTask(spec.schema, frozenset(spec.eos), tuple(spec.emitted))
        return list(self._grammars.want((message.request, message.attempt), task))

    def _stored(self, event: FrameStored, now: float) -> list[Output]:
        outputs = self._receiver.data.on_frame(event.frame, intact=event.intact, now=now)
        if event.intact:
            return [*outputs]
        return [Log("handoff.frame_damaged", {"frame": event.frame.index}), *outputs]

    # ------------------------------------------------------------------ links

    def _open(self, peer: bytes, message: Open, key: bytes) -> Action:
        refusal = self._refusal(message)
        if refusal is not None:
            return ToPeer(peer, refusal)
        self._receiver.peer_moved(Holder(message.incarnation, key), peer)
        own, theirs = self._member.identity.model.layout, message.model.layout
        self._layouts.pop(peer, None)
        if own != theirs:
            frames = frame_layout(theirs, own)
            if frames != own:
                self._layouts[peer] = frames
            return ToPeer(peer, self._opened(STREAMED))
        if message.pool is not None and SHARED in message.transports:
            return MapPool(peer, message.incarnation, message.pool, SHARED)
        if message.device_pool is not None and DEVICE in message.transports:
            return MapPool(peer, message.incarnation, message.device_pool, DEVICE)
        return ToPeer(peer, self._opened(STREAMED))

    def _mapped(self, event: PoolMapped) -> list[Output]:
        self._in_place.discard(event.peer)
        if event.failure:
            line = Log("handoff.not_shared", {"reason": event.failure})
            return [line, ToPeer(event.peer, self._opened(STREAMED))]
        if event.transport == DEVICE:
            self._in_place.add(event.peer)
        return [ToPeer(event.peer, self._opened(event.transport))]

    def _refusal(self, message: Open) -> Message | None:
        try:
            check_version(message.version, f"worker {message.worker}")
        except VersionMismatch as error:
            return Rejected(code=error.code, message=str(error))
        mismatch = self._member.identity.model.mismatch(message.model)
        if mismatch:
            field, ours, theirs = mismatch
            return OpenRefused(field=field, ours=ours, theirs=theirs)
        if STREAMED not in message.transports:
            theirs = ",".join(message.transports)
            return OpenRefused(field="transports", ours=STREAMED, theirs=theirs)
        return None

    def _opened(self, transport: str) -> Opened:
        return Opened(
            worker=self._member.identity.worker,
            incarnation=self._member.identity.incarnation,
            transport=transport,
            data_endpoint=self._data_endpoint,
            max_frame_bytes=MAX_NAMED_BYTES if transport == DEVICE else self._max_frame_bytes,
            layout=self._member.identity.model.layout,
        )

    def _probe(self, nonce: int) -> ProbeReply:
        me = self._member.identity
        return ProbeReply(
            nonce=nonce,
            version=PROTOCOL_VERSION,
            worker=me.worker,
            role=me.role,
            incarnation=me.incarnation,
        )


def _busy(message: Reserve, reason: str) -> Busy:
    return Busy(request=message.request, attempt=message.attempt, reason=reason, retry_after=0.2)
