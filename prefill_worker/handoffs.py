"""The conversation of a prefill worker with decode workers, from Open to Committed.

Invariants: blocks are reserved only over a ready link; a decode worker's message changes only
handoffs with that worker; blocks that a decode worker may still read stay held. Pure: the sender
has the state of each handoff.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from baton.engine.cache.paged_cache import Allocation, PagedCache
from baton.engine.scheduling.plan import StepPlan
from baton.kv_transfer import sender_handoff as handoff
from baton.kv_transfer.sender import Sender
from baton.kv_transfer.sender_handoff import Key
from baton.proto.errors import AccessDenied, InternalError
from baton.proto.layout import frame_layout, layout_mismatch
from baton.proto.wire.messages import (
    DEVICE,
    READ_IN_PLACE,
    Aborted,
    Busy,
    Committed,
    Credit,
    Grant,
    GrantRef,
    Message,
    Opened,
    OpenRefused,
    Ping,
    Pong,
    Refused,
    Rejected,
    Released,
    Revoke,
    Stale,
)
from baton.worker.events import Log
from baton.worker.membership import Membership

from .decode_links import DecodeLink, DecodeLinks, LinkState
from .events import (
    Action,
    DataDown,
    DataUp,
    Disconnect,
    FromPeer,
    HandoffEvent,
    LayersDone,
    NotPacked,
    OpenData,
    Packed,
    PackFrame,
    PeerDown,
    PeerUp,
    Raised,
    ToPeer,
)
from .job import Job
from .queue import Queue

Outcome = handoff.Granted | handoff.Refusal | handoff.Done | handoff.Failed
"""What a handoff means for its job; the core decides what follows."""
Output = Outcome | Action | Raised


class Handoffs:
    """Handoffs of all jobs of one worker, and the blocks held for readers.

    Outputs are iterators: the core handles each output before the next one is made, because an
    outcome may end the job that the next output concerns.
    """

    def __init__(
        self,
        member: Membership,
        sender: Sender,
        links: DecodeLinks,
        queue: Queue,
        cache: PagedCache,
        growth: int,
    ) -> None:
        """``growth``: blocks are reserved for at most this many tokens after the prompt."""
        self._member = member
        self._sender = sender
        self._links = links
        self._queue = queue
        self._cache = cache
        self._growth = growth
        self._readers: dict[Key, Allocation] = {}  # blocks that a decode worker may still read
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sender)

    # ------------------------------------------------------------------ one job

    def reserve(self, job: Job, link: DecodeLink, now: float) -> Iterator[Output]:
        """Reserve blocks for the job at its decode worker."""
        self._serial += 1
        incarnation = self._member.identity.incarnation
        layout = link.layout or self._member.identity.model.layout
        reserve = job.reserve(incarnation, self._serial, self._growth, layout.block_size, now)
        outputs = self._sender.start(
            link.endpoint,
            link.incarnation,
            reserve,
            now,
            link.frame_limit,
            shared=link.transport in READ_IN_PLACE,
            fenced=link.transport == DEVICE,
            layout=link.layout,
        )
        return self._outputs(outputs)

    def ready(self, job: Job, tokens: int, *, last: bool, now: float) -> Iterator[Output]:
        """Send the KV of the job's tokens below ``tokens``, computed in all layers."""
        layers = self._member.identity.model.layout.num_layers
        outputs = self._sender.ready(
            job.key, layer_end=layers, token_end=tokens, last=last, now=now
        )
        return self._outputs(outputs)

    def commit(self, job: Job, now: float) -> Iterator[Output]:
        """Send the manifest and the context once all frames are sent."""
        maker = job.commit_maker(self._member.identity.worker, now)
        return self._outputs(self._sender.finish(job.key, maker, now))

    def release(self, job: Job, now: float) -> Iterator[Output]:
        """End the job's handoff, if there is one, and release its grant."""
        if job.key not in self._sender:
            return iter(())
        return self._outputs(self._sender.release(job.key, now))

    # ------------------------------------------------------------------ events

    def handle(self, event: HandoffEvent, now: float) -> Iterator[Output]:
        """Handle an event of a link to a decode worker, or of a frame's way there."""
        match event:
            case FromPeer(endpoint=endpoint, message=message):
                return self._hear(endpoint, message, now)
            case Packed(key=key, index=index, checksum=checksum):
                return self._outputs(self._sender.on_packed(key, index, checksum, now))
            case NotPacked(key=key):
                return self._outputs(self._sender.not_packed(key))
            case LayersDone():
                return self._layers_done(event, now)
            case PeerUp(endpoint=endpoint):
                return iter(self._links.up(endpoint, now))
            case PeerDown(endpoint=endpoint):
                self._links.down(endpoint, now)
            case DataUp(endpoint=endpoint):
                self._links.data(endpoint, stands=True, now=now)
                self._queue.wake(endpoint)
            case DataDown(endpoint=endpoint):
                self._links.data(endpoint, stands=False, now=now)
        return iter(())

    def key_of(self, endpoint: str, grant: GrantRef) -> tuple[bytes, int] | None:
        """Return the attempt that sends into a grant of a decode worker, or None."""
        return self._sender.key_of(endpoint, grant)

    def agree_again(self, event: HandoffEvent, now: float) -> None:
        """Send Open again after the handling of a link's event has raised.

        What was lost with it is done when the peer answers: repeating messages, opening the data
        connection. If that raises again and again, the link is lost after the timeout, and its
        jobs are given back.
        """
        endpoint = getattr(event, "endpoint", "")
        if isinstance(event, DataUp | DataDown):
            self._links.data(endpoint, stands=isinstance(event, DataUp), now=now)
        self._links.agree_again(endpoint, now)
        self._queue.wake(endpoint)

    def step_begins(self, plan: StepPlan) -> None:
        """Note which part of each prompt the step computes; its layers are sent meanwhile."""
        for chunk in plan.chunks:
            job = self._queue.named(chunk.request)
            if job:
                job.token_end = chunk.start + len(chunk.tokens)
                job.last_chunk = chunk.sample is not None

    def _layers_done(self, event: LayersDone, now: float) -> Iterator[Output]:
        job = self._queue.named(event.sequence)
        if job is None:
            return iter(())
        outputs = self._sender.ready(
            job.key,
            layer_end=event.layer_end,
            token_end=job.token_end,
            last=job.last_chunk,
            now=now,
        )
        return self._outputs(outputs)

    def _hear(self, endpoint: str, message: Message, now: float) -> Iterator[Output]:
        if self._is_anothers(endpoint, message):
            self._member.dropped["peer_anothers_handoff"] += 1
            return iter(())
        match message:
            case Opened():
                return self._opened(endpoint, message, now)
            case OpenRefused():
                return iter(self._open_refused(endpoint, message))
            case Rejected():
                return self._rejected(endpoint, message, now)
            case Ping(nonce=nonce):
                return iter([ToPeer(endpoint, Pong(nonce=nonce))])
            case Pong(nonce=nonce):
                self._links.pong(endpoint, nonce)
                return iter(())
            case _:
                return self._outputs(self._progress(endpoint, message, now))

    def _progress(self, endpoint: str, message: Message, now: float) -> list[handoff.Output]:
        """Pass a message about a handoff to the sender."""
        sender = self._sender
        match message:
            case Grant():
                return sender.on_grant(endpoint, message, now)
            case Busy():
                return sender.on_busy(message)
            case Credit():
                return sender.on_credit(endpoint, message, now)
            case Committed():
                return sender.on_committed(message, now)
            case Refused():
                return sender.on_refused(message, now)
            case Stale():
                return sender.on_stale(message)
            case Released() | Aborted():
                return sender.on_gone(message.request, message.attempt)
            case Revoke():
                return sender.on_revoke(endpoint, message)
            case _:  # ProbeReply: this worker sends no Probe
                return []

    def _is_anothers(self, endpoint: str, message: Message) -> bool:
        """True if a decode worker sends a message about a handoff with another worker."""
        match message:
            case Busy() | Committed() | Refused() | Stale() | Released() | Aborted():
                return not self._sender.is_with(endpoint, message.request, message.attempt)
            case _:
                return False

    # ------------------------------------------------------------------ links

    def _rejected(self, endpoint: str, message: Rejected, now: float) -> Iterator[Output]:
        code, text = message.code, message.message
        if code == "version_mismatch":
            self._queue.wake(endpoint)
            return iter(self._links.of_another_version(endpoint, text))
        if code == "endpoint_dead":
            # Only routers declare workers dead. This affects only the link to that worker.
            return self._outputs(self._sender.unreachable(endpoint, text))
        fields: dict[str, object] = {"endpoint": endpoint, "code": code, "reason": text}
        lines: list[Output] = [Log("peer.rejected", fields)]
        if code == AccessDenied.code:
            # Repeating the message cannot help, so the routers use another decode worker.
            self._links.denied(endpoint, text, now)
            self._queue.wake(endpoint)
            return itertools.chain(lines, self._outputs(self._sender.unreachable(endpoint, text)))
        return iter(lines)

    def _opened(self, endpoint: str, message: Opened, now: float) -> Iterator[Output]:
        link = self._links.get(endpoint)
        if link is None or link.state is LinkState.OPEN:
            return
        if link.incarnation not in (0, message.incarnation):
            reason = f"{endpoint} was restarted"
            yield from self._outputs(self._sender.peer_lost(endpoint, reason, link.incarnation))
        elif link.incarnation:
            yield from self._outputs(self._sender.reconnected(endpoint, now))
        refusal = self._unusable(message)
        if refusal is not None:
            yield from self._open_refused(endpoint, refusal)
            return
        self._links.opened(link, message, now)
        self._queue.wake(endpoint)
        yield OpenData(endpoint, message.data_endpoint)

    def _unusable(self, message: Opened) -> OpenRefused | None:
        """Return why frames cannot be sent to a worker that has accepted the link, or None."""
        model = self._member.identity.model
        theirs = message.layout or model.layout
        mismatch = layout_mismatch(theirs, model.layout, converts=model.converts)
        if mismatch is not None:
            field, other, own = mismatch
            return OpenRefused(field=field, ours=other, theirs=own)
        block_bytes = frame_layout(model.layout, theirs).block_bytes
        if message.max_frame_bytes >= block_bytes:
            return None
        limit = f"{message.max_frame_bytes} bytes, a block has {block_bytes}"
        return OpenRefused(field="max_frame_bytes", ours=limit, theirs="whole blocks")

    def _open_refused(self, endpoint: str, message: OpenRefused) -> list[Action]:
        self._queue.wake(endpoint)
        return self._links.refused(endpoint, message)

    def worker_died(self, endpoint: str, incarnation: int) -> Iterator[Output]:
        """Drop the link to a worker that a router declared dead; fail its handoffs."""
        link = self._links.of_worker(endpoint, incarnation)
        if link is None:
            return
        outputs = self._sender.peer_lost(link.endpoint, "the worker died", incarnation)
        self._links.drop(link)
        self._queue.wake(link.endpoint)
        yield from self._outputs(outputs)
        yield Disconnect(link.endpoint)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> Iterator[Output]:
        """Repeat messages and end handoffs whose time is over; keep the links in use alive."""
        yield from self._outputs(self._sender.tick(now))
        busy = self._sender.endpoints()
        yield from self._links.tick(now, lambda name: name in busy or self._queue.wants(name))

    def drop_lost_links(self, now: float) -> Iterator[Output]:
        """Fail jobs that wait for an unreachable decode worker; drop links unused for long."""
        for link in self._links:
            reason = link.hopeless(now)
            if not reason:
                continue
            yield from self._outputs(self._sender.unreachable(link.endpoint, reason))
            if self._queue.wants(link.endpoint):
                self._queue.wake(link.endpoint)
            elif link.is_stale(now) and link.endpoint not in self._sender.endpoints():
                self._links.drop(link)
                yield Disconnect(link.endpoint)

    # ------------------------------------------------------------------ outputs of the sender

    def _outputs(self, outputs: Iterable[handoff.Output]) -> Iterator[Output]:
        """Yield what each output of the sender means. An error leaves the outputs after it."""
        for output in outputs:
            try:
                yield from self._output(output)
            except Exception as error:
                yield Raised(output, error)

    def _output(self, output: handoff.Output) -> Iterator[Output]:
        match output:
            case handoff.Send(endpoint=endpoint, message=message):
                yield ToPeer(endpoint, message)
            case handoff.SendFrame():
                yield from self._pack(output)
            case handoff.Gone(key=key):
                self._not_read(key)  # its job is removed with it
            case handoff.Done(key=key) | handoff.Failed(key=key):
                yield output
                self._not_read(key)
            case _:
                yield output

    def _pack(self, output: handoff.SendFrame) -> Iterator[Output]:
        job = self._queue.get(output.key)
        allocation = job.sequence.allocation if job else None
        if allocation is None:
            return
        link = self._links.get(output.endpoint)
        shared = link is not None and link.transport in READ_IN_PLACE
        if link is not None and output.frame.nbytes > link.frame_limit:
            # The peer could read these blocks in place when the frame was cut, and no longer can.
            yield from self._outputs(self._sender.not_packed(output.key))
            return
        if self._sender.may_be_read(output.key) and output.key not in self._readers:
            self._readers[output.key] = self._cache.hold(allocation)
        layout = None if link is None else link.layout
        yield PackFrame(output, allocation.block_table, shared, layout)

    def _not_read(self, key: Key) -> None:
        """Free the blocks held for a decode worker's reads, unless it may still read them."""
        if self._sender.may_be_read(key):
            return
        held = self._readers.pop(key, None)
        if held is not None:
            self._cache.free(held)

    # ------------------------------------------------------------------ integrity

    def check_integrity(self) -> list[Allocation]:
        """Return the blocks held for readers.

        Raises InternalError if nothing can read them, or if a handoff goes on without a job.
        """
        self._sender.check_integrity()
        if not all(self._queue.get(key) for key in self._sender.going_on()):
            raise InternalError("a handoff goes on without its job")
        if not all(self._sender.may_be_read(key) for key in self._readers):
            raise InternalError("blocks are held for a decode worker that no longer reads them")
        return list(self._readers.values())
