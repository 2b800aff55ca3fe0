"""Contexts between real processes are what the public codec writes, and it alone reads them.

Taps on the sockets of a running cluster keep every message. Only the envelope is taken apart by
hand, as docs/protocol.md explains; their content is for ``msgpack_numpy_decoder(TextContext)``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.benchmarks.checkpoints import Shape, write_checkpoint
from baton.proto import (
    RequestID,
    SamplingParams,
    TextContext,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)

from ..processes import wait_until
from .driver import collect
from .wire_tap import WireTap

pytestmark = pytest.mark.cluster

LENGTHS = (1, 2, 1000, 32_000, 100_000)
NEW = 3
# One layer: only the last row of a prompt attends, so that 100k tokens take a moment.
SHAPE = Shape("one-layer", 300, 32, 64, 1, 2, 1, positions=1 << 17)

PREFIX = {b"BT": 3, b"BS": 11}
"""Bytes before the messages in the first frame of an envelope, plain and sealed."""


class Message(msgspec.Struct):
    """The fields of a message that are read without the protocol."""

    type: str
    request_id: str = ""
    context: msgspec.Raw = msgspec.Raw(b"")
    arrays: int = 0
    emitted: list[int] = []


class Kept:
    """Contexts that passed a tap, by type of message and name of request."""

    def __init__(self) -> None:
        self.contexts: dict[tuple[str, str], list[bytes]] = defaultdict(list)
        self._parts = threading.local()  # of the message under way; a thread per direction

    def __call__(self, body: bytearray, more: bool) -> None:
        """One frame of a message."""
        parts = self._parts.__dict__.setdefault("parts", [])
        parts.append(bytes(body))
        if more:
            return
        self._parts.parts = []
        start = PREFIX.get(parts[0][:2])
        if start is None:  # frames of another protocol would be lost otherwise
            return
        frame = 1
        for message in msgspec.msgpack.decode(parts[0][start:], type=list[Message]):
            arrays = parts[frame : frame + message.arrays]
            frame += message.arrays
            if memoryview(message.context).nbytes:
                key = (message.type, message.request_id)
                self.contexts[key].append([bytes(message.context), *arrays])

    def frames(self, kind: str, name: str) -> list[bytes]:
        """Those of the one context of a request in messages of one type."""
        found = self.contexts[kind, name]
        assert found and all(frames == found[0] for frames in found), (kind, name, len(found))
        return found[0]


def tap_of(folder: Path, name: str, kept: Kept) -> WireTap:
    (path,) = folder.rglob(name)
    return WireTap(path, kept, kept)


@pytest.fixture(scope="module")
def tapped(shared_cluster, tmp_path_factory):
    """A cluster of one pair whose sockets are all tapped."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"), SHAPE, "F32")
    running = shared_cluster(model=model, prefill=1, decode=1, kv_memory="128MiB")
    kept, before = Kept(), running.pids()
    names = sorted(path.name for path in running.folder.rglob("*.sock"))
    control = [name for name in names if "decode-0" not in name and "prefill-0" not in name]
    taps = [tap_of(running.folder, name, kept) for name in (*control, "decode-0.sock")]
    os.kill(before["prefill-0"], signal.SIGKILL)  # the next one connects through the taps
    running.wait_replaced("prefill-0", before["prefill-0"])
    running.wait_ready()
    yield running, kept
    for tap in taps:
        tap.close()


def make_context(length: int) -> TextContext:
    rng = np.random.default_rng(length)
    return TextContext(
        max_length=length + NEW,
        tokens=rng.integers(3, SHAPE.vocab, length),
        request_id=RequestID(f"wire-{length}"),
        eos_token_ids={2},
        eos_sequences=[[SHAPE.vocab - 1] * 4],
        log_probabilities=2,
        ignore_eos=True,
        sampling_params=SamplingParams(
            temperature=0.7, seed=length, max_new_tokens=NEW, ignore_eos=True
        ),
        cache_salt="tenant",
    )


decode = msgpack_numpy_decoder(TextContext)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_public_decoder_reads_every_context_on_its_way(tapped, length):
    running, kept = tapped
    sent = make_context(length)
    name = str(sent.request_id)
    with running.client() as client:
        answer = collect(client.generate(sent))
    assert len(answer.tokens) == NEW
    wait_until(lambda: kept.contexts["Commit", name], what="the Commit")

    submitted = kept.frames("Submit", name)
    assert submitted == [bytes(frame) for frame in msgpack_numpy_encoder().frames(sent)]
    assert decode(submitted) == sent
    assert kept.frames("Assign", name) == submitted, "the router forwards what it got"

    committed = decode(kept.frames("Commit", name))
    expected = decode(submitted)
    (entry,) = committed._log_probabilities_data.values()
    expected.update(answer.tokens[0], entry)
    assert committed == expected
    assert (entry.token_log_probabilities[0], entry.top_log_probabilities[0]) == answer.logprobs[0]
    assert committed.to_generation_output().tokens == answer.tokens[:1]


def test_large_arrays_travel_beside_the_map(tapped):
    _, kept = tapped
    for kind in ("Submit", "Assign", "Commit"):
        sizes = [len(frame) for frame in kept.frames(kind, "wire-100000")[1:]]
        assert sizes == [4 * (100_000 + (kind == "Commit"))]
        assert len(kept.frames(kind, "wire-1000")) == 1
