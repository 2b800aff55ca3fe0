"""Parameters that older workers would ignore: placed only where a worker reads them."""

import msgspec
import pytest

from baton.proto.wire.messages import Assign, Terminal
from baton.proto.wire.wire_context import WireSampling

from .conftest import CARD, Bench, make_config, make_context

OLD = msgspec.structs.replace(CARD, features=[])


def biased(**fields):
    sampling = WireSampling(max_new_tokens=20, logit_bias={3: 5.0})
    return msgspec.structs.replace(make_context(**fields), sampling=sampling)


@pytest.fixture
def bench():
    return Bench(make_config())


def refusal(bench) -> str:
    terminal = bench.one(b"client", Terminal)
    assert terminal.code == "feature_missing"
    return terminal.message


def test_a_cluster_of_old_workers_refuses_the_parameter(bench):
    for role in ("prefill", "decode"):
        bench.join(role, model=OLD)
    bench.submit(context=biased())
    assert refusal(bench) == "logit_bias needs newer workers than the cluster has"
    bench.submit("s")
    bench.find(Assign)


@pytest.mark.parametrize("old", ["prefill", "decode"])
def test_one_old_role_is_enough_to_refuse(bench, old):
    for role in ("prefill", "decode"):
        bench.join(role, model=OLD if role == old else CARD)
    bench.submit(context=biased())
    assert refusal(bench) == f"logit_bias needs newer {old} workers than the cluster has"


@pytest.mark.parametrize("new_first", [True, False])
def test_in_a_mixed_cluster_new_workers_get_the_parameter(bench, new_first):
    for number in range(2):
        for role in ("prefill", "decode"):
            new = (number == 0) is new_first
            bench.join(role, number, model=CARD if new else OLD)
    new = 0 if new_first else 1
    for number in range(8):
        bench.submit(f"r{number}", context=biased())
        prefill, assign = bench.find(Assign)
        decode = bench.decode_of(assign)
        assert (prefill.id, decode.id) == (f"prefill-{new}", f"decode-{new}")
    chosen = set()
    for number in range(8):
        bench.submit(f"s{number}")
        chosen.add(bench.find(Assign)[0].id)
    assert f"prefill-{1 - new}" in chosen


def test_a_pool_and_a_pinned_worker_are_checked(bench):
    bench.pair()
    for role in ("prefill", "decode"):
        bench.join(role, 1, model=OLD, pool="old")
    bench.submit(context=biased(), pool="old")
    assert refusal(bench) == "logit_bias needs newer decode workers than the cluster has"
    bench.submit("s", context=biased(target_endpoint="ipc:///run/decode-1"))
    assert refusal(bench) == "logit_bias needs a newer worker than decode-1"
    bench.submit("t", context=biased(target_endpoint="ipc:///run/decode-0"))
    bench.find(Assign)


def test_a_request_whose_new_worker_died_waits_for_the_successor(bench):
    prefill, decode = bench.pair()
    bench.join("decode", 1, model=OLD)
    bench.submit(context=biased())
    prefill, assign = bench.find(Assign)
    prefill.accept(assign)
    assert bench.decode_of(assign) is decode
    decode.gone()
    bench.advance(3.0)
    assert not bench.take(b"client", Terminal)
    bench.join("decode", 0)
    _, again = bench.find(Assign)
    assert bench.decode_of(again).id == "decode-0"


def test_a_request_that_came_before_the_workers_is_checked_later(bench):
    bench.submit(context=biased())
    assert not bench.take(b"client", Terminal)
    for role in ("prefill", "decode"):
        bench.join(role, model=OLD)
    assert refusal(bench) == "logit_bias needs newer workers than the cluster has"
