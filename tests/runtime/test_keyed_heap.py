from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.keyed_heap import SLACK, Agenda

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "drop", "due"]), st.integers(0, 6), st.integers(0, 9))
)


@given(STEPS)
def test_what_is_due_comes_in_order_and_once(steps):
    agenda, plain = Agenda(), {}
    for step, key, at in steps:
        if step == "put":
            agenda.put(key, at)
            plain.pop(key, None)
            plain[key] = at
        elif step == "drop":
            agenda.drop(key)
            plain.pop(key, None)
        else:
            want = [k for k, when in sorted(plain.items(), key=lambda item: item[1]) if when <= at]
            assert agenda.due(at) == want
            for one in want:
                del plain[one]
        assert len(agenda) == len(plain)
        assert all(one in agenda for one in plain)


def test_pop_takes_the_least():
    agenda = Agenda()
    for key, at in (("late", 5.0), ("early", 1.0), ("middle", 3.0)):
        agenda.put(key, at)
    assert agenda.pop(0.5) is None
    assert [agenda.pop(9.0) for _ in range(4)] == ["early", "middle", "late", None]


def test_dropped_entries_take_no_memory_for_ever():
    agenda = Agenda()
    for number in range(10_000):
        agenda.put(number, number)
        agenda.put("again", number)
        agenda.drop(number - 3)
    assert len(agenda) == 4
    assert len(agenda._heap) <= 2 * len(agenda) + SLACK + 1
