from hypothesis import given
from hypothesis import strategies as st

from baton.worker.attempts import Attempts

KEYS = st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 4))


@given(st.lists(st.tuples(st.sampled_from(["put", "pop", "forget"]), KEYS)))
def test_it_answers_as_a_plain_dict_does(steps):
    table, plain = Attempts(), {}
    for number, (step, key) in enumerate(steps):
        if step == "put":
            table[key] = plain[key] = number
        elif step == "pop":
            assert table.pop(key, None) == plain.pop(key, None)
        else:
            table.forget(*key)
            plain = {k: v for k, v in plain.items() if k[0] != key[0] or k[1] > key[1]}
        assert dict(table) == plain
        assert len(table) == len(plain)
        for request in (b"a", b"b"):
            mine = sorted((k[1], v) for k, v in plain.items() if k[0] == request)
            assert table.of(request) == [v for _, v in mine]
            assert table.of(request, 2) == [v for a, v in mine if a <= 2]
            assert table.newest(request) == (mine[-1][1] if mine else None)


def test_nothing_stays_of_a_request_without_attempts():
    table = Attempts()
    table[b"a", 1] = "x"
    del table[b"a", 1]
    assert not table._attempts
