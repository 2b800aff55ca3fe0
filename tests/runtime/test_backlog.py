"""The limit on what a connection is ahead of its reader."""

from __future__ import annotations

from baton.runtime.net.backlog import Backlog

LIMIT = 1000


class Kernel:
    """Counts of received bytes by descriptor."""

    def __init__(self) -> None:
        self.received: dict[int, int] = {}
        self.backlog = Backlog(LIMIT, self.received.get)

    def open(self, fd: int) -> None:
        self.received[fd] = 0
        self.backlog.opened(fd)


def test_only_a_connection_above_the_limit_is_named():
    kernel = Kernel()
    for fd in (1, 2):
        kernel.open(fd)
    kernel.received.update({1: LIMIT + 1, 2: LIMIT})
    assert kernel.backlog.excessive() == [1]


def test_what_was_taken_does_not_count():
    kernel = Kernel()
    kernel.open(1)
    for _ in range(100):  # the socket is never empty
        kernel.received[1] += LIMIT
        kernel.backlog.taken(1, LIMIT)
        assert kernel.backlog.excessive() == []
    kernel.received[1] += LIMIT + 1
    assert kernel.backlog.excessive() == [1]


def test_pings_do_not_add_up_while_the_socket_is_empty_now_and_then():
    kernel = Kernel()
    kernel.open(1)
    kernel.backlog.taken(1, 0)
    for _ in range(100):
        kernel.received[1] += 60
        kernel.backlog.drained = True
        assert kernel.backlog.excessive() == []


def test_an_empty_socket_has_no_part_of_a_connection_that_is_never_read():
    """ZeroMQ keeps the messages of a second connection with an identity, and delivers none."""
    kernel = Kernel()
    kernel.open(1)
    for _ in range(11):
        kernel.received[1] += 100
        kernel.backlog.drained = True
        found = kernel.backlog.excessive()
    assert found == [1]


def test_a_descriptor_begins_anew_after_its_number_was_reused():
    kernel = Kernel()
    kernel.open(1)
    kernel.received[1] = LIMIT + 1
    kernel.open(1)
    assert kernel.backlog.excessive() == []
    kernel.backlog.closed(1)
    kernel.backlog.taken(1, 5)
    kernel.received[1] = 2 * LIMIT
    assert kernel.backlog.excessive() == []


def test_more_taken_than_received_gives_no_room_for_later():
    """Late messages of an earlier connection with this number count for the new one."""
    kernel = Kernel()
    kernel.open(1)
    kernel.backlog.taken(1, 10 * LIMIT)
    kernel.backlog.excessive()
    kernel.received[1] = LIMIT + 1
    assert kernel.backlog.excessive() == [1]
