"""What a gateway learns about the way of its requests: workers and times."""

import numpy as np
import pytest
from msgspec.structs import replace

from baton.proto.wire.messages import Assign, ServedTimes, Terminal, Tokens, WorkerTimes
from baton.proto.wire.wire_context import WireContext, WireTokens
from baton.router.events import ClientFull

TIMES = WorkerTimes(
    started=0.1, granted=0.15, computing=0.2, sending=0.25, computed=0.5, ended=0.75
)


def first_tokens(bench, **fields):
    """Start a request, and return its key, its Assign and what is sent with its first token."""
    key, assign = bench.run(**fields)
    bench.advance(1.0)
    prefill = next(worker for worker in bench.workers if worker.hello.role == "prefill")
    prefill.tokens(key, 10, 5)
    (message,) = bench.take(b"client", Tokens) or [Tokens(runs=[])]
    return key, assign, prefill, message


def test_the_first_tokens_of_a_gateways_request_name_its_workers(bench):
    bench.pair()
    key, _, prefill, message = first_tokens(bench, gateway="gateway-0")
    (begun,) = message.begun
    assert (begun.request, begun.prefill, begun.decode) == (key, "prefill-0", "decode-0")
    assert begun.times == ServedTimes(first_token=pytest.approx(1.0))
    prefill.tokens(key, 11, 6)
    (later,) = bench.take(b"client", Tokens)
    assert later.begun == []


@pytest.mark.parametrize("fields", [{}, {"gateway": "gateway-0", "whole": True}])
def test_others_are_not_told(fields, bench):
    bench.pair()
    *_, message = first_tokens(bench, **fields)
    assert message.begun == []


def test_embeddings_keep_nothing_for_a_later_message(bench, card):
    worker = bench.join("prefill", model=replace(card, task="embed", embedding_size=3))
    context = WireContext(
        tokens=WireTokens(np.arange(5, dtype=np.int32)), max_length=5, task="embed"
    )
    key = bench.submit("r", context=context, gateway="gateway-0")
    worker.accept(bench.one(worker, Assign))
    worker.end(key, 5, embedding=np.ones(3, np.float32))
    (client,) = bench.core.clients.all()
    assert (len(bench.take(b"client", Terminal)), client.begun) == (1, [])


def test_nothing_is_kept_for_a_client_that_reads_slowly(bench):
    bench.pair()
    key, _ = bench.run(gateway="gateway-0")
    (client,) = bench.core.clients.all()
    bench.feed(ClientFull(b"client"))
    bench.workers[0].tokens(key, 10, 5)
    assert client.begun == []


def test_the_end_of_a_handed_over_request_has_all_times(bench):
    bench.pair()
    key, assign, prefill, _ = first_tokens(bench, gateway="gateway-0")
    prefill.report(assign, times=TIMES)
    bench.decode_of(assign).end(key, 11, decode="decode-0", times=WorkerTimes(computing=9.0))
    (terminal,) = bench.take(b"client", Terminal)
    assert terminal.served == ServedTimes(
        queue=pytest.approx(0.2), prefill=pytest.approx(0.3), handoff=pytest.approx(0.25),
        first_token=pytest.approx(1.0),
    )  # fmt: skip
    assert terminal.times is None


def test_without_the_report_only_the_first_token_is_known(bench):
    bench.pair()
    key, assign, *_ = first_tokens(bench, gateway="gateway-0")
    bench.decode_of(assign).end(key, 11, decode="decode-0", times=WorkerTimes(computing=9.0))
    (terminal,) = bench.take(b"client", Terminal)
    assert terminal.served == ServedTimes(first_token=pytest.approx(1.0))


def test_a_request_that_ends_at_its_prefill_worker_has_no_handoff(bench):
    bench.pair()
    key, _, prefill, _ = first_tokens(bench, gateway="gateway-0")
    prefill.end(key, 11, prefill="prefill-0", times=replace(TIMES, ended=None))
    (terminal,) = bench.take(b"client", Terminal)
    assert terminal.served == ServedTimes(
        queue=pytest.approx(0.2), prefill=pytest.approx(0.3), first_token=pytest.approx(1.0)
    )


def test_a_native_clients_terminal_has_no_times(bench):
    bench.pair()
    key, _, prefill, _ = first_tokens(bench)
    prefill.end(key, 11, times=TIMES)
    (terminal,) = bench.take(b"client", Terminal)
    assert terminal.served is None
