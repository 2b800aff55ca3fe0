"""Contexts between real processes are what the public codec writes, and it alone reads them.

Taps on the sockets of a running cluster keep every message. Only the envelope is taken apart by
hand, as docs/protocol.md explains; their content is for ``msgpack_numpy_decoder(TextContext)``.
"""

from __future__ import annotations

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
from .kept_contexts import kept_contexts

pytestmark = pytest.mark.cluster

LENGTHS = (1, 2, 1000, 32_000, 100_000)
NEW = 3
# One layer: only the last row of a prompt attends, so that 100k tokens take a moment.
SHAPE = Shape("one-layer", 300, 32, 64, 1, 2, 1, positions=1 << 17)


@pytest.fixture(scope="module")
def tapped(shared_cluster, tmp_path_factory):
    """A cluster of one pair whose sockets are all tapped."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"), SHAPE, "F32")
    running = shared_cluster(model=model, prefill=1, decode=1, kv_memory="128MiB")
    with kept_contexts(running) as kept:
        yield running, kept


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
