"""A prefill worker's sockets to a decode worker that goes, pauses or takes no KV frames."""

from __future__ import annotations

import pytest

from baton.kv_transfer.checksums import envelope_digest
from baton.prefill_worker.decode_sockets import DecodeSockets, PeerEvent
from baton.prefill_worker.events import DataDown, DataUp, FromPeer, PeerDown, PeerUp
from baton.proto.limits import MAX_JSON_SCHEMA_CHARS
from baton.proto.wire.envelope import EnvelopeDecoder
from baton.proto.wire.messages import GrammarSpec, Ping, PrefillToDecode, Reserve
from baton.runtime.net.channel import ChannelOptions
from baton.runtime.net.sockets import RouterChannel
from baton.runtime.net.wiring import Wiring

pytestmark = pytest.mark.integration


class Ears:
    """Peer links and their reports."""

    def __init__(self, loop, context) -> None:
        self.told: list[object] = []
        self.links = DecodeSockets(Wiring(loop, context), "prefill-0", self.feed)

    def feed(self, event: PeerEvent) -> None:
        if isinstance(event, PeerUp):
            self.told.append("up")
            self.links.send(event.endpoint, Ping())
            self.links.flush()
        elif isinstance(event, FromPeer):
            self.told.append(event.message)
        else:
            self.told.append({PeerDown: "down", DataUp: "data", DataDown: "no data"}[type(event)])


def listen(loop, context, address: str, heard: list[bytes]) -> RouterChannel:
    # A paused process: it does not notice the end of a connection by missing heartbeats.
    options = ChannelOptions(heartbeat_s=0, heartbeat_timeout_s=0)
    router = RouterChannel(context, address, options=options)
    router.attach(loop, lambda identity, frames: heard.append(identity))
    return router


def test_every_connection_has_an_identity_of_its_own(loop, drive, context, tmp_path):
    """A worker that has not noticed the end of one connection ignores a second of that name."""
    address, heard = f"ipc://{tmp_path}/decode", []
    router = listen(loop, context, address, heard)
    ears = Ears(loop, context)
    ears.links.connect(address)
    drive.until(lambda: len(heard) == 1)
    router.close()
    drive.until(lambda: "down" in ears.told)
    router = listen(loop, context, address, heard)
    drive.until(lambda: len(heard) == 2)
    assert heard[0] != heard[1]
    assert ears.told == ["up", "down", "up"]
    ears.links.close()
    router.close()


def test_a_turns_messages_may_be_more_than_an_envelope_takes(loop, drive, context, tmp_path):
    """The largest schemas of many requests: each arrives, in order."""
    address, heard = f"ipc://{tmp_path}/decode", []
    decoder = EnvelopeDecoder(PrefillToDecode, digest=envelope_digest)
    router = RouterChannel(context, address)
    router.attach(loop, lambda identity, frames: heard.extend(decoder.decode(frames)))
    ears = Ears(loop, context)
    ears.links.connect(address)
    drive.until(lambda: "up" in ears.told)
    spec = GrammarSpec("\N{CRAB}" * MAX_JSON_SCHEMA_CHARS, [0], [])
    for serial in range(40):
        ears.links.send(
            address,
            Reserve(
                request=b"r" * 16, attempt=1, incarnation=5, hashes=[], num_tokens=1, growth=0,
                serial=serial, deadline=1.0, grammar=spec,
            ),
        )  # fmt: skip
    ears.links.flush()
    drive.until(lambda: sum(isinstance(message, Reserve) for message in heard) == 40)
    serials = [message.serial for message in heard if isinstance(message, Reserve)]
    assert serials == list(range(40))
    ears.links.close()
    router.close()


def test_it_tells_whether_kv_frames_can_be_sent(loop, drive, context, tmp_path):
    address, data = f"ipc://{tmp_path}/decode", f"ipc://{tmp_path}/data"
    ears = Ears(loop, context)
    ears.links.connect(address)
    ears.links.open_data(address, data)
    assert ears.told == ["no data"]
    router = listen(loop, context, data, [])
    drive.until(lambda: "data" in ears.told)
    router.close()
    drive.until(lambda: ears.told[-1] == "no data")
    router = listen(loop, context, data, [])
    drive.until(lambda: ears.told[-1] == "data")
    ears.links.close()
    router.close()


def test_an_address_nobody_can_have_is_no_data(loop, context, tmp_path):
    address = f"ipc://{tmp_path}/decode"
    ears = Ears(loop, context)
    ears.links.connect(address)
    ears.links.open_data(address, "tcp://nonsense")
    assert ears.told == ["no data"]
    ears.links.close()
