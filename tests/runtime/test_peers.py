"""The table of each peer's connection."""

from __future__ import annotations

from baton.runtime.net.sockets import REMEMBER_CLOSED_S, PeerTable


def test_a_closed_descriptor_names_its_peers():
    peers = PeerTable()
    assert not peers.heard(b"a", 7, 0.0)
    assert not peers.heard(b"b", 8, 0.0)
    assert peers.closed(7, 1.0) == [b"a"]
    assert peers.closed(9, 1.0) == []
    assert b"a" in peers  # not gone until verified
    peers.forget(b"a")
    peers.forget(b"a")
    assert len(peers) == 1
    assert peers.closed(7, 2.0) == []


def test_a_peer_that_came_back_is_listed_under_its_new_connection():
    peers = PeerTable()
    peers.heard(b"a", 7, 0.0)
    peers.heard(b"a", 9, 1.0)
    assert peers.closed(7, 1.0) == []
    assert peers.closed(9, 2.0) == [b"a"]


def test_a_message_read_after_its_connection_closed_is_suspect():
    peers = PeerTable()
    peers.closed(7, 1.0)
    assert peers.heard(b"a", 7, 1.5)
    assert not peers.heard(b"a", 7, 1.6)  # reported once
    assert not peers.heard(b"b", 7, 1.0 + REMEMBER_CLOSED_S)


def test_a_reused_descriptor_suspects_both():
    peers = PeerTable()
    peers.heard(b"old", 7, 0.0)
    peers.heard(b"new", 7, 0.1)
    assert sorted(peers.closed(7, 0.2)) == [b"new", b"old"]


def test_old_closures_are_forgotten():
    peers = PeerTable()
    for fd in range(1000):
        peers.closed(fd, float(fd))
    assert len(peers._closed_at) < 300
