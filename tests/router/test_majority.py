"""One foreign key neither changes the served model nor its limits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.proto.wire.messages import Assign, Rejected, Welcome

from .test_trust import ROGUE, VICTIM, Keyed

OTHER = b"other key"


@pytest.fixture
def keyed() -> Keyed:
    return Keyed()


def again(worker) -> None:
    worker.say(worker.hello)


def live(keyed: Keyed) -> set[str]:
    return {one.id for one in keyed.bench.core.registry.live()}


def code(keyed: Keyed, worker) -> str:
    return keyed.bench.one(worker, Rejected).code


def test_a_foreign_model_that_registers_first_is_outvoted(keyed, card):
    """As after a router's restart: the honest workers come one after the other."""
    foreign = replace(card, fingerprint="foreign")
    rogue = keyed.join("decode", ROGUE, "rogue-0", model=foreign)
    keyed.join("prefill", ROGUE, "rogue-1", model=foreign)
    prefill = keyed.join("prefill", VICTIM, "prefill-0")
    assert code(keyed, prefill) == "model_contested"
    decode = keyed.join("decode", OTHER, "decode-0")
    assert keyed.bench.take(decode, Welcome)
    again(prefill)
    assert keyed.bench.take(prefill, Welcome)
    assert live(keyed) == {"prefill-0", "decode-0"}
    again(rogue)
    assert code(keyed, rogue) == "endpoint_dead"
    late = keyed.join("decode", ROGUE, "rogue-2", model=foreign)
    assert code(keyed, late) == "model_mismatch"
    assert keyed.bench.core.registry.card.fingerprint == card.fingerprint


def test_a_literal_name_decides_between_two_keys(keyed, card):
    rogue = keyed.join("decode", ROGUE, "rogue", model=replace(card, fingerprint="foreign"))
    keyed.join("decode", VICTIM, "decode-0", vouched=True)
    assert live(keyed) == {"decode-0"}
    again(rogue)
    assert code(keyed, rogue) == "endpoint_dead"


def test_one_key_never_takes_the_place_of_one_that_serves(keyed, card):
    keyed.join("prefill", VICTIM, "prefill-0")
    rogue = keyed.join("decode", ROGUE, "rogue", model=replace(card, fingerprint="foreign"))
    for _ in range(100):
        again(rogue)
        keyed.bench.advance(0.2)
        keyed.bench.core.registry.find("prefill-0").seen_at = keyed.bench.now
    assert {one.code for one in keyed.bench.take(rogue, Rejected)} == {"model_contested"}
    assert "prefill-0" in live(keyed)


def test_claims_of_workers_that_left_do_not_count(keyed, card):
    other = replace(card, fingerprint="other")
    keyed.join("prefill", VICTIM, "prefill-0")
    keyed.join("decode", ROGUE, "a", model=other)
    keyed.bench.now += 11.0
    second = keyed.join("decode", OTHER, "b", model=other)
    assert code(keyed, second) == "model_contested"
    assert live(keyed) == {"prefill-0"}


def test_another_model_with_a_key_that_serves_is_a_mistake(keyed, card):
    keyed.join("decode", VICTIM, "decode-0")
    other = keyed.join("decode", VICTIM, "decode-1", model=replace(card, fingerprint="other"))
    assert code(keyed, other) == "model_mismatch"


@pytest.mark.parametrize("limit", [10, 1 << 20])
@pytest.mark.parametrize("first", [False, True])
def test_a_foreign_limit_changes_no_other(keyed, card, limit, first):
    foreign = replace(card, max_length=limit, name="foreign", max_pixels=limit)
    keys = (VICTIM, OTHER)
    if first:
        keyed.join("decode", ROGUE, "rogue", model=foreign)
    for number, key in enumerate(keys):
        keyed.join("prefill", key, f"prefill-{number}", model=replace(card, max_pixels=99))
        keyed.join("decode", key, f"decode-{number}", model=replace(card, max_pixels=99))
    keyed.join("decode", ROGUE, "rogue", model=foreign)
    found = keyed.bench.core.registry.card
    assert (found.max_length, found.name, found.max_pixels) == (card.max_length, card.name, 99)


def test_a_request_is_placed_where_it_fits(keyed, card, context):
    small = replace(card, max_length=50)
    keyed.join("prefill", VICTIM, "prefill-0")
    for number, key in enumerate((VICTIM, OTHER)):
        keyed.join("decode", key, f"decode-{number}")
    keyed.join("decode", ROGUE, "small", model=small)
    names = {one.incarnation: one.id for one in keyed.bench.core.registry.live()}
    for number in range(6):
        keyed.bench.submit(f"long-{number}", context=context(prompt=30, max_length=60))
        assign = keyed.bench.find(Assign)[1]
        assert names[assign.decode_incarnation].startswith("decode-")
