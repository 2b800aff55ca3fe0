import numpy as np
import pytest

from baton.proto.hashing import block_hashes

TOKENS = np.arange(100, 150, dtype=np.int32)


def test_only_full_blocks_are_hashed():
    assert [len(block_hashes(TOKENS[:n], 8, b"")) for n in (0, 7, 8, 15, 16, 50)] == [
        0,
        0,
        1,
        1,
        2,
        6,
    ]


def test_a_chain_can_be_continued():
    whole = block_hashes(TOKENS, 8, b"salt")
    head = block_hashes(TOKENS[:16], 8, b"salt")
    assert head + block_hashes(TOKENS[16:], 8, b"salt", head[-1]) == whole


def test_a_hash_stands_for_everything_before_it():
    changed = TOKENS.copy()
    changed[3] += 1
    ours, theirs = block_hashes(TOKENS, 8, b""), block_hashes(changed, 8, b"")
    assert not set(ours) & set(theirs)
    changed = TOKENS.copy()
    changed[20] += 1
    theirs = block_hashes(changed, 8, b"")
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True, True] + [False] * 4


def test_equal_blocks_at_different_places_differ():
    assert len(set(block_hashes(np.zeros(64, np.int32), 8, b""))) == 8


@pytest.mark.parametrize("salts", [(b"a", b"b"), (b"", b"a"), (b"x" * 65, b"x" * 66)])
def test_salts_separate_tenants(salts):
    one, two = (block_hashes(TOKENS, 8, salt) for salt in salts)
    assert not set(one) & set(two)


def test_integer_width_and_strides_do_not_matter():
    expected = block_hashes(TOKENS, 8, b"")
    assert block_hashes(TOKENS.astype(np.int64), 8, b"") == expected
    assert block_hashes(np.repeat(TOKENS, 2)[::2], 8, b"") == expected


def test_known_value():
    assert block_hashes(np.arange(4, dtype=np.int32), 4, b"salt")[0].hex() == (
        "c5aea0463ecfae58b1159b2e499bcb20"
    )


def test_block_size_must_be_positive():
    with pytest.raises(ValueError, match="block_size"):
        block_hashes(TOKENS, 0, b"")
