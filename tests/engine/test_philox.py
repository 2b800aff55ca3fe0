import pytest

from baton.engine.sampling.philox import philox4x32, uniform

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_takes_53_bits_of_the_first_two_words():
    assert uniform(0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_uniform_is_evenly_spread_and_below_one():
    draws = [uniform(7, position) for position in range(4000)]
    assert 0 <= min(draws) < 0.002
    assert 0.998 < max(draws) < 1
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02


def test_every_argument_changes_the_draw():
    base = uniform(1, 2, 3, 4)
    others = [
        uniform(2, 2, 3, 4),
        uniform(1 + (1 << 32), 2, 3, 4),
        uniform(1, 3, 3, 4),
        uniform(1, 2 + (1 << 32), 3, 4),
        uniform(1, 2, 4, 4),
        uniform(1, 2, 3, 5),
    ]
    assert len({base, *others}) == 7
