"""Which connections a gateway keeps when they are too many, without a socket."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.gateway.connections import Connections, Phase, Place, address_of, places_for
from baton.proto.errors import ConfigError

MOST = 64
SHARE = MOST * 7 // 8


class Crowd:
    """A table and its open connections; ended ones are gone at once."""

    def __init__(self, most: int = MOST, lanes: int = 4) -> None:
        self.table = Connections(most, lanes)
        self.open: list[Place] = []
        self.now = 1000.0

    def come(self, address: str, count: int = 1, phase: Phase = Phase.FRESH) -> list[Place]:
        came = []
        for _ in range(count):
            self.now += 1.0
            place, ended = self.table.opened(address, self.now)
            for one in ended:
                self.table.closed(one)
            self.open = [one for one in self.open if one not in ended] + [place]
            came.append(place)
            if phase is not Phase.FRESH:
                place.works()
            if phase is Phase.IDLE:
                place.rests(self.now)
        return came

    def left(self) -> Counter[str]:
        return Counter(one.address for one in self.open if one.phase is not Phase.REFUSED)


def test_idle_connections_of_one_address_keep_nobody_out():
    crowd = Crowd()
    crowd.come("evil", 10 * MOST)
    assert crowd.left() == {"evil": SHARE}
    honest = crowd.come("honest", 20)
    assert all(one in crowd.open and one.phase is Phase.FRESH for one in honest)
    assert len(crowd.open) <= MOST


def test_a_connection_that_was_admitted_outlives_any_number_of_fresh_ones():
    """Also of its own address, which an attacker may share."""
    crowd = Crowd()
    kept = [*crowd.come("proxy", 4, Phase.WORKING), *crowd.come("proxy", 4, Phase.IDLE)]
    for number in range(20 * MOST):
        crowd.come("proxy")
        crowd.come(f"bot-{number}")
    assert all(one in crowd.open for one in kept)


def test_a_new_connection_has_time_for_its_first_request():
    crowd = Crowd()
    crowd.come("evil", 4 * MOST)
    (honest,) = crowd.come("evil")
    crowd.come("evil", MOST // 2)
    assert honest in crowd.open
    honest.works()
    crowd.come("evil", 4 * MOST)
    assert honest in crowd.open


def test_what_came_just_now_is_not_closed_and_the_next_ones_wait_in_the_kernel():
    table = Connections(MOST, 4)
    came = [table.opened(str(at), 50.0)[0] for at in range(MOST)]
    assert not table.takes_more(50.9)
    for place in came:
        place.works()
    assert table.takes_more(50.9)  # to be refused
    came[5].rests(50.9)
    place, ended = table.opened("x", 50.9)
    assert (place.phase, ended) == (Phase.FRESH, [came[5]])


def test_idle_connections_of_a_holder_of_a_key_make_room_for_strangers():
    crowd = Crowd()
    crowd.come("hog", SHARE, Phase.IDLE)
    crowd.come("b", MOST - SHARE, Phase.IDLE)
    came = crowd.come("c", 6)
    assert all(one in crowd.open for one in came)
    assert crowd.left()["b"] == MOST - SHARE
    assert crowd.left()["hog"] < SHARE


def test_the_oldest_of_the_largest_address_goes_first():
    crowd = Crowd(16)
    old, *rest = crowd.come("a", 9, Phase.IDLE)
    crowd.come("b", 7, Phase.IDLE)
    old.works()
    old.rests(crowd.now + 0.5)  # the latest answer
    crowd.come("c")
    assert old in crowd.open
    assert [one in crowd.open for one in rest] == [False] + [True] * 7


def test_a_working_connection_is_never_closed_and_the_new_one_is_refused():
    crowd = Crowd()
    work = crowd.come("a", SHARE, Phase.WORKING) + crowd.come("b", MOST - SHARE, Phase.WORKING)
    for number in range(4):
        assert crowd.table.takes_more(crowd.now)
        (place,) = crowd.come(f"c{number}", phase=Phase.WORKING)
        assert place.phase is Phase.REFUSED
    assert not crowd.table.takes_more(crowd.now)
    assert all(one in crowd.open for one in work)
    crowd.table.closed(place)
    assert crowd.table.takes_more(crowd.now)
    crowd.table.closed(work[0])
    assert crowd.come("c")[0].phase is Phase.FRESH
    assert (crowd.table.refused, crowd.table.crowded_out) == (4, 0)


def test_one_address_leaves_an_eighth_to_others():
    crowd = Crowd()
    crowd.come("a", SHARE, Phase.WORKING)
    assert crowd.come("a")[0].phase is Phase.REFUSED
    assert crowd.come("b")[0].phase is Phase.FRESH


def test_what_is_crowded_out_counts_until_its_descriptor_is_free():
    table = Connections(MOST, 4)
    ended = [one for at in range(MOST + 4) for one in table.opened(str(at), at)[1]]
    assert len(ended) == 4
    assert not table.takes_more(MOST + 4)
    table.closed(ended[0])
    assert table.takes_more(MOST + 4)


def test_random_crowds_stay_within_the_limits():
    draw = random.Random(5)
    crowd = Crowd(32, 4)
    for _ in range(5000):
        crowd.now += 1.0
        act = draw.random()
        if act < 0.5 and crowd.table.takes_more(crowd.now):
            works = {one for one in crowd.open if one.phase is Phase.WORKING}
            crowd.come(draw.choice("aaab"), phase=draw.choice(list(Phase)[:3]))
            assert works <= set(crowd.open)
        elif crowd.open:
            one = draw.choice(crowd.open)
            if act < 0.8:
                one.works() if act < 0.65 else one.rests(crowd.now)
            else:
                crowd.table.closed(one)
                crowd.open.remove(one)
        assert sum(crowd.left().values()) == len(crowd.table) <= 32
        assert max(crowd.left().values(), default=0) <= 28
        assert sum(one.phase is Phase.REFUSED for one in crowd.open) <= 4


@pytest.mark.parametrize(
    ("host", "shared"),
    [
        ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"), ("", ""),
    ],
)  # fmt: skip
def test_shares_are_counted_by_address_or_by_network(host, shared):
    assert address_of(host) == shared


def test_the_limit_follows_from_the_descriptors():
    assert places_for(1 << 20, 50, 4096) == (4096, 64)
    most, lanes = places_for(64, 40, 4096)
    assert most + lanes + 40 == 64
    assert most >= 16
    with pytest.raises(ConfigError, match="limit of 40 open files is too low"):
        places_for(40, 36, 4096)
