"""A worker's connections to its routers."""

from __future__ import annotations

from collections import Counter

import numpy as np

from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import Ping, Terminal, WorkerToRouter
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.net.wiring import Wiring
from baton.worker.events import RouterDown, RouterUp
from baton.worker.router_links import RouterLinks


def test_every_connection_has_an_identity_of_its_own(loop, drive, context, tmp_path):
    """A router that has not noticed a disconnect ignores a second connection with its identity."""
    address = f"ipc://{tmp_path}/router"
    heard: list[bytes] = []

    def listen() -> RouterChannel:
        router = RouterChannel(context, address)
        router.attach(loop, lambda identity, frames: heard.append(identity))
        return router

    def deliver(event) -> None:
        events.append(type(event))
        if isinstance(event, RouterUp):
            links.send("r", Ping())
            links.flush()

    events: list[type] = []
    router = listen()
    links = RouterLinks(Wiring(loop, context), {"r": address}, "worker:1", deliver)
    drive.until(lambda: len(heard) == 1)
    router.close()
    drive.until(lambda: RouterDown in events)
    router = listen()
    drive.until(lambda: len(heard) == 2)
    assert all(identity.startswith(b"worker:1/") for identity in heard)
    assert heard[0] != heard[1]
    assert events == [RouterUp, RouterDown, RouterUp]
    links.close()
    router.close()


def test_what_a_router_says_in_vain_is_counted(loop, drive, context, tmp_path):
    address = f"ipc://{tmp_path}/router"
    dropped: Counter[str] = Counter()
    router = RouterChannel(context, address)
    router.attach(loop, lambda identity, frames: router.send(identity, [b"nonsense"]))

    def deliver(event) -> None:
        links.send("r", Ping())
        links.flush()

    links = RouterLinks(Wiring(loop, context), {"r": address}, "worker:1", deliver, dropped=dropped)
    drive.until(lambda: dropped["router_decode_failed"] == 1)
    links.close()
    router.close()


def test_a_turn_larger_than_an_envelope_is_split_and_reaches_every_router(
    loop, drive, context, tmp_path
):
    """For example after a Hello, with 1,100 unacknowledged embeddings."""
    heard: dict[str, list] = {"a": [], "b": []}
    decoder = EnvelopeDecoder(WorkerToRouter)
    routers = {}
    for name, messages in heard.items():
        routers[name] = RouterChannel(context, f"ipc://{tmp_path}/{name}")
        routers[name].attach(
            loop, lambda _, frames, messages=messages: messages.extend(decoder.decode(frames))
        )
    ups: list[str] = []

    def deliver(event) -> None:
        if isinstance(event, RouterUp):
            ups.append(event.router)

    addresses = {name: router.endpoint for name, router in routers.items()}
    links = RouterLinks(Wiring(loop, context), addresses, "worker:1", deliver)
    drive.until(lambda: len(ups) == 2)
    vector = np.ones(4096, np.float32)
    for number in range(1100):
        name = number.to_bytes(16, "little")
        links.send("a", Terminal(request=name, attempt=1, status="active", embedding=vector))
    links.send("a", Ping(nonce=1))
    links.send("b", Ping(nonce=2))
    links.flush()
    drive.until(lambda: len(heard["a"]) == 1101 and heard["b"] == [Ping(nonce=2)])
    assert [int.from_bytes(m.request, "little") for m in heard["a"][:-1]] == list(range(1100))
    links.close()
    for router in routers.values():
        router.close()


def test_an_end_that_no_envelope_can_carry_becomes_an_error(loop, drive, context, tmp_path):
    heard: list = []
    decoder = EnvelopeDecoder(WorkerToRouter)
    router = RouterChannel(context, f"ipc://{tmp_path}/router")
    router.attach(loop, lambda _, frames: heard.extend(decoder.decode(frames)))
    ups: list[object] = []
    dropped: Counter[str] = Counter()
    links = RouterLinks(
        Wiring(loop, context), {"r": router.endpoint}, "worker:1", ups.append, dropped=dropped
    )
    drive.until(lambda: RouterUp("r") in ups)
    request = b"r" * 16
    links.send("r", Terminal(request=request, attempt=3, message="x" * (17 << 20)))
    links.send("r", Ping(nonce=1))
    links.flush()
    drive.until(lambda: len(heard) == 2)
    ends = [message for message in heard if isinstance(message, Terminal)]
    assert [(end.request, end.attempt, end.code) for end in ends] == [
        (request, 3, "limit_exceeded")
    ]
    assert dropped == {"not_encodable": 1}
    links.close()
    router.close()
