"""A subscriber to KV events, from the published schema alone: it shares no code with Baton."""

from __future__ import annotations

import msgspec
import zmq


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(EventBatch).decode


class Follower:
    """The blocks of one worker: hash to (parent, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[bytes | int, tuple[bytes | int | None, tuple[int, ...]]] = {}
        self.stored = self.removed = self.cleared = 0

    def take(self, payload: bytes) -> None:
        for event in decode(payload).events:
            match event:
                case BlockStored(hashes, parent, tokens, size):
                    assert len(tokens) == size * len(hashes)
                    for number, name in enumerate(hashes):
                        assert name not in self.blocks
                        span = tokens[number * size : (number + 1) * size]
                        self.blocks[name] = (parent, tuple(span))
                        parent = name
                    self.stored += len(hashes)
                case BlockRemoved(hashes):
                    for name in hashes:
                        del self.blocks[name]
                    self.removed += len(hashes)
                case AllBlocksCleared():
                    self.blocks.clear()
                    self.cleared += 1


class Subscriber:
    """Sockets to a worker's events and replays."""

    def __init__(self, addresses: list[str], topic: str = "") -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.events.connect(addresses[0])
        self.replays = self.context.socket(zmq.DEALER)
        self.replays.connect(addresses[1])

    def receive(self, timeout: float = 20.0) -> tuple[bytes, int, bytes]:
        """Return topic, number and payload of the next batch."""
        assert self.events.poll(timeout * 1000), "no batch"
        topic, number, payload = self.events.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Return all batches from number ``first`` on that the worker has kept."""
        self.replays.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.replays.poll(20_000), "no end of the replay"
            _, number, payload = self.replays.recv_multipart()
            if number == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self.context.destroy(linger=0)
