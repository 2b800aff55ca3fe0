from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from baton.runtime.admissions import HANDSHAKE_S, Admissions


def test_who_speaks_is_not_counted_any_more():
    admissions = Admissions(2)
    for fd in range(100):
        assert admissions.accepted(fd, "a", 0.0) is None
        admissions.settled(fd)
    assert len(admissions) == 0


def test_an_address_is_crowded_out_by_itself_alone():
    admissions = Admissions(4)
    assert admissions.accepted(1, "honest", 0.0) is None
    gone = [admissions.accepted(fd, "flood", 0.1) for fd in range(10, 20)]
    assert gone == [None, None, None, 10, 11, 12, 13, 14, 15, 16]
    assert admissions.accepted(2, "honest", 0.2) == 17


def test_a_connection_that_outlived_a_handshake_is_not_counted():
    """It may be a client that has nothing to say yet."""
    admissions = Admissions(2)
    for fd in range(100):
        assert admissions.accepted(fd, "a", fd * HANDSHAKE_S) is None
    assert len(admissions) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.booleans())))
def test_the_bound_holds_whatever_comes(steps):
    admissions, standing = Admissions(3), {}
    for now, (fd, address, opens) in enumerate(steps):
        if not opens:
            admissions.settled(fd)
            standing.pop(fd, None)
            continue
        standing[fd] = address
        gone = admissions.accepted(fd, address, now * 1e-3)
        if gone is not None:
            most = Counter(standing.values())
            assert most[standing.pop(gone)] == max(most.values())
        assert len(admissions) == len(standing) <= 3
