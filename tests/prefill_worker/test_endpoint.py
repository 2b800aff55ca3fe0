from typing import get_args

import pytest

from baton.prefill_worker.endpoint import answer
from baton.proto.wire.messages import (
    Fence,
    GrantRef,
    Ping,
    Pong,
    PrefillToDecode,
    Probe,
    Rejected,
    Release,
)
from baton.worker.membership import WorkerIdentity

from .test_core import CARD

ME = WorkerIdentity("prefill-0", "prefill", 5, 1, "ipc:///p", "default", CARD, 8)


def test_it_says_who_it_is():
    reply = answer(ME, Probe(nonce=7))
    assert (reply.nonce, reply.worker, reply.role, reply.incarnation) == (
        7,
        "prefill-0",
        "prefill",
        5,
    )
    assert answer(ME, Ping(nonce=3)) == Pong(nonce=3)
    assert answer(ME, Pong()) is None


@pytest.mark.parametrize(
    "message", [Fence(grant=GrantRef(1, 2, 3)), Release(request=b"r", attempt=1)]
)
def test_who_takes_it_for_a_decode_worker_is_told(message):
    reply = answer(ME, message)
    assert isinstance(reply, Rejected)
    assert type(message).__name__ in reply.message
    assert type(message) in get_args(PrefillToDecode)
