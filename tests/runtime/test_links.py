"""A worker's connections to its routers."""

from __future__ import annotations

from collections import Counter

from baton.proto.messages import Ping
from baton.runtime.actions import RouterDown, RouterUp
from baton.runtime.links import RouterLinks
from baton.runtime.sockets import RouterChannel


def test_every_connection_has_an_identity_of_its_own(loop, drive, context, tmp_path):
    """A router that has not noticed the end of one connection ignores a second of that name."""
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
    links = RouterLinks(loop, context, {"r": address}, b"worker:1", deliver)
    drive.until(lambda: len(heard) == 1)
    router.close()
    drive.until(lambda: RouterDown in events)
    router = listen()
    drive.until(lambda: len(heard) == 2)
    assert all(identity.startswith(b"worker:1") for identity in heard)
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

    links = RouterLinks(loop, context, {"r": address}, b"worker:1", deliver, dropped=dropped)
    drive.until(lambda: dropped["router_decode_failed"] == 1)
    links.close()
    router.close()
