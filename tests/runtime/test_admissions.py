from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from baton.runtime.net.admissions import HANDSHAKE_S, Admissions, Stage


def silent(fd: int) -> Stage:
    return Stage.SILENT


def test_a_finished_handshake_is_not_counted_any_more():
    admissions = Admissions(2, silent)
    for fd in range(100):
        assert admissions.accepted(fd, "a", 0.0) is None
        admissions.settled(fd)
    assert len(admissions) == 0


def test_an_address_is_crowded_out_by_itself_alone():
    admissions = Admissions(4, silent)
    assert admissions.accepted(1, "honest", 0.0) is None
    gone = [admissions.accepted(fd, "flood", 0.1) for fd in range(10, 20)]
    assert gone == [None, None, None, 10, 11, 12, 13, 14, 15, 16]
    assert admissions.accepted(2, "honest", 0.2) == 17


def test_of_one_address_the_handshake_that_got_least_far_goes():
    stages = {1: Stage.ANSWERED, 2: Stage.SPOKEN}
    asked = Counter()

    def stage_of(fd: int) -> Stage:
        asked[fd] += 1
        return stages.get(fd, Stage.SILENT)

    admissions = Admissions(4, stage_of)
    for fd in (1, 2, 10, 11):
        assert admissions.accepted(fd, "a", 0.0) is None
    assert [admissions.accepted(fd, "a", 0.1) for fd in range(12, 112)] == list(range(10, 110))
    assert max(asked.values()) <= len(Stage)
    stages |= dict.fromkeys(range(110, 300), Stage.SPOKEN)
    gone = [admissions.accepted(fd, "a", 0.2) for fd in range(200, 300)]
    assert gone[:3] == [2, 110, 111]  # all have sent bytes, so the oldest
    assert 1 not in gone


def test_a_connection_that_outlived_a_handshake_is_not_counted():
    """It may be a client that has nothing to send yet."""
    admissions = Admissions(2, silent)
    for fd in range(100):
        assert admissions.accepted(fd, "a", fd * HANDSHAKE_S) is None
    assert len(admissions) == 1


STEPS = st.tuples(
    st.integers(0, 9), st.sampled_from("abc"), st.booleans(), st.sampled_from(list(Stage))
)


@given(st.lists(STEPS))
def test_the_bound_holds_whatever_comes(steps):
    stages: dict[int, Stage] = {}
    admissions, standing = Admissions(3, lambda fd: stages[fd]), {}
    for now, (fd, address, opens, stage) in enumerate(steps):
        stages[fd] = stage
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
