"""Taking a request over from a prefill worker, when something about it is wrong."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.decode_worker.core import DecodeCore
from baton.decode_worker.events import FromPeer, ToPeer
from baton.decode_worker.handoffs import GrantStore
from baton.engine.cache.paged_cache import PagedCache
from baton.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from baton.kv_transfer.receiver import Receiver
from baton.kv_transfer.receiver_grants import ReceiverConfig
from baton.proto.layout import KVLayout
from baton.proto.wire.context_maps import grown_map
from baton.proto.wire.messages import (
    Commit,
    Committed,
    Grant,
    KVFrame,
    Reserve,
    Terminal,
    Tokens,
    Welcome,
)
from baton.proto.wire.proofs import Holder, Terms, reserve_ticket
from baton.proto.wire.wire_context import WireContext, WireSampling, WireTokens
from baton.worker.events import Fault, FromRouter, RouterUp, RunStep, ToRouter
from baton.worker.membership import Membership, WorkerIdentity

from ..model_cards import model_card

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
CARD = model_card(layout=LAYOUT)
REQUEST, PEER = b"r" * 16, b"prefill"
WORKER_KEY = b"k" * 16
TERMS = Terms(200, 0, 600)


class Decode:
    """A decode core and its messages."""

    def __init__(self) -> None:
        me = WorkerIdentity(
            worker="d", role="decode", incarnation=7, pid=1, endpoint="ipc:///d", pool="default",
            model=CARD, max_batch=4,
        )  # fmt: skip
        self.cache = PagedCache(16, 4)
        self.scheduler = Scheduler(SchedulerConfig(), self.cache)
        store = GrantStore(self.cache, self.scheduler)
        self.receiver = Receiver(7, LAYOUT, store, ReceiverConfig())
        member = Membership(me, ("router",))
        self.core = DecodeCore(member, self.scheduler, self.receiver, ("ipc:///data", 1 << 20))
        self.core.handle(RouterUp("router"), 0.0)
        welcome = Welcome(router="router", incarnation=3, key=WORKER_KEY)
        self.core.handle(FromRouter("router", welcome), 0.0)

    def hand_over(self, **change: object) -> list[object]:
        """A handoff of ten tokens up to its Commit, which is ``change``\\ d; messages said."""
        reserve = Reserve(
            request=REQUEST, attempt=1, incarnation=5, hashes=[], num_tokens=10, growth=4,
            deadline=60.0, ticket=reserve_ticket(WORKER_KEY, REQUEST, 1, Holder(5), TERMS),
        )  # fmt: skip
        (action,) = self.core.handle(FromPeer(PEER, reserve), 0.0)
        assert isinstance(action, ToPeer) and isinstance(action.message, Grant)
        grant = action.message.grant
        size = 3 * LAYOUT.block_bytes
        frame = KVFrame(grant, 0, 0, 1, 0, 3, size, 99)
        assert self.receiver.data.locate(frame) is not None
        self.receiver.data.on_frame(frame, intact=True, now=0.0)
        context = WireContext(
            tokens=WireTokens(np.arange(10, dtype=np.int32)), max_length=40,
            sampling=WireSampling(max_new_tokens=8),
        )  # fmt: skip
        commit = Commit(
            request=REQUEST, attempt=1, grant=grant, frames=1, bytes=size, digest=99,
            context=grown_map(context, [3]), router="router", deadline=60.0,
        )  # fmt: skip
        self.actions = self.core.handle(
            FromPeer(PEER, msgspec.structs.replace(commit, **change)), 1.0
        )
        return [a.message for a in self.actions if isinstance(a, ToPeer | ToRouter)]


def test_a_request_taken_over_runs():
    decode = Decode()
    committed, tokens = decode.hand_over()
    assert isinstance(committed, Committed) and isinstance(tokens, Tokens)
    assert any(isinstance(action, RunStep) for action in decode.actions)


def context(**fields):
    return WireContext(
        **{"tokens": WireTokens(np.arange(10, dtype=np.int32)), "max_length": 40, **fields}
    )


WRONG = {
    "generated id": {"context": grown_map(context(), [1 << 20])},
    "prompt id": {
        "context": grown_map(context(tokens=WireTokens(np.array([1 << 20] * 10, np.int32))), [3])
    },
    "sampling": {"context": grown_map(context(sampling=WireSampling(temperature=-1.0)), [3])},
    "no room": {"context": grown_map(context(max_length=10), [3])},
    "windows": {
        "context": msgspec.structs.replace(grown_map(context(), [3]), _carried_end=5),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_run_ends_at_once_and_leaves_nothing(name):
    decode = Decode()
    terminal = next(m for m in decode.hand_over(**WRONG[name]) if isinstance(m, Terminal))
    assert (terminal.code, terminal.request) == ("handoff_failed", REQUEST)
    assert decode.cache.pool.used == 0
    assert decode.core.idle
    decode.core.check_integrity()


def test_a_bug_of_ours_ends_the_request_for_good_and_is_told_with_its_traceback(monkeypatch):
    """The router runs a failed handoff again, on up to eight pairs: the bug is on all of them."""
    decode = Decode()

    def broken(_sequence):
        raise KeyError("broken")

    monkeypatch.setattr(decode.scheduler, "adopt", broken)
    terminal = next(m for m in decode.hand_over() if isinstance(m, Terminal))
    assert terminal.code == "internal" and "broken" not in terminal.message
    (fault,) = [action for action in decode.actions if isinstance(action, Fault)]
    assert fault.error.__traceback__ is not None and fault.fields["request"] == REQUEST.hex()
    assert decode.core._member.dropped == {"internal_error": 1}
    assert decode.cache.pool.used == 0
    decode.core.check_integrity()
