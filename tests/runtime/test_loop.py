"""Timers, posts and socket visits of the event loop."""

from __future__ import annotations

import os
import threading
from itertools import pairwise

import pytest
import zmq

from baton.runtime.net.loop import RETRY_S, Loop


def pair(context):
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (left, right):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
    port = left.bind_to_random_port("tcp://127.0.0.1")
    right.connect(f"tcp://127.0.0.1:{port}")
    return left, right


def taking(socket, taken):
    def on_readable():
        try:
            taken.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return False
        return True

    return on_readable


def test_timers_fire_in_order_and_never_early(loop, drive):
    fired = []
    start = loop.now() + 0.1  # all are set before the first is due, on a busy machine too
    for delay in (0.02, 0.0, 0.0105, 0.003):
        loop.call_at(start + delay, lambda d=delay: fired.append((d, loop.now() - start)))
    drive.until(lambda: len(fired) == 4)
    assert [delay for delay, _ in fired] == [0.0, 0.003, 0.0105, 0.02]
    assert all(at >= delay for delay, at in fired)


def test_cancelled_timer_stays_silent(loop, drive):
    fired = []
    timer = loop.call_later(0.005, lambda: fired.append("no"))
    timer.cancel()
    timer.cancel()
    loop.call_later(0.02, lambda: fired.append("end"))
    drive.until(lambda: fired)
    assert fired == ["end"]


def test_posts_from_threads_keep_their_order(loop, drive):
    seen = []
    threads = [
        threading.Thread(
            target=lambda n=n: [loop.post(lambda i=i: seen.append((n, i))) for i in range(500)]
        )
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    drive.until(lambda: len(seen) == 1000)
    for thread in threads:
        thread.join()
    for n in range(2):
        assert [i for who, i in seen if who == n] == list(range(500))


def test_post_after_close_is_harmless():
    loop = Loop()
    loop.close()
    loop.post(lambda: None)


def test_an_exception_ends_neither_the_loop_nor_the_turn(loop, drive, capsys):
    seen = []
    loop.on_turn_end(lambda: 1 // 0)
    loop.on_turn_end(lambda: seen.append("flushed"))
    loop.post(lambda: 1 // 0)
    loop.post(lambda: seen.append("posted"))
    loop.call_later(0.001, lambda: [][0])
    drive.until(lambda: {"posted", "flushed"} <= set(seen) and loop.callback_errors >= 3)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_fd_callback_ends_a_turn(loop, drive):
    read_end, write_end = os.pipe()
    order = []
    loop.on_turn_end(lambda: order.append("end"))
    loop.add_fd(read_end, lambda: order.append(os.read(read_end, 10)))
    os.write(write_end, b"x")
    drive.until(lambda: b"x" in order and order[-1] == "end")
    loop.remove_fd(read_end)
    os.close(read_end)
    os.close(write_end)


def test_an_fd_whose_callback_raises_is_watched_again_but_does_not_fill_the_log(loop, drive):
    read_end, write_end = os.pipe()
    calls = []

    def raises_three_times():
        calls.append(loop.now())
        if len(calls) <= 3:
            raise KeyError("planted")
        os.read(read_end, 10)

    loop.add_fd(read_end, raises_three_times)
    os.write(write_end, b"x")
    drive.until(lambda: len(calls) == 4)
    assert loop.callback_errors == 3
    assert all(later - call >= RETRY_S for call, later in pairwise(calls))
    loop.remove_fd(read_end)
    os.close(read_end)
    os.close(write_end)


@pytest.mark.integration
def test_messages_that_came_before_the_registration_are_seen(loop, drive, context):
    left, right = pair(context)
    right.send(b"early")
    assert left.poll(30_000)
    taken = []
    loop.add_socket(left, taking(left, taken))
    drive.until(lambda: taken)


@pytest.mark.integration
def test_a_send_that_swallows_the_signal_loses_no_message(loop, drive, context):
    """A send processes the socket's commands, so the descriptor may never signal."""
    left, right = pair(context)
    echoes, taken = [], []
    loop.add_socket(left, taking(left, taken))
    loop.add_socket(right, taking(right, echoes))
    loop.on_turn_end(lambda: left.send(b"flush") if len(taken) < 200 else None)

    def say():
        right.send(b"x")
        if len(taken) < 200:
            loop.call_later(0.0, say)

    say()
    drive.until(lambda: len(taken) >= 200)


@pytest.mark.integration
def test_a_flooded_socket_starves_nobody(loop, drive, context):
    flooded, flooder = pair(context)
    quiet, speaker = pair(context)
    for _ in range(5000):
        flooder.send(b"f")
    speaker.send(b"q")
    assert flooded.poll(30_000) and quiet.poll(30_000)
    order, timer = [], []
    loop.add_socket(flooded, lambda: bool(taking(flooded, order)()))
    loop.add_socket(quiet, lambda: bool(taking(quiet, order)()))
    loop.call_later(0.0, lambda: timer.append(len(order)))
    drive.until(lambda: len(order) == 5001)
    assert order.index(b"q") <= 101
    assert timer[0] < 5000


@pytest.mark.integration
def test_a_socket_that_is_only_read_loses_nothing(loop, drive, context):
    """It is polled only after a signal, which may stand for more messages than a turn handles."""
    left, right = pair(context)
    for number in range(3000):
        right.send(b"%d" % number)
    assert left.poll(30_000)
    taken, turns = [], []
    loop.add_socket(left, taking(left, taken), sends=False)
    loop.on_turn_end(lambda: turns.append(len(taken)))
    drive.until(lambda: len(taken) == 3000)
    assert len(turns) > 1
    for number in range(3000, 3010):  # each with a separate signal
        right.send(b"%d" % number)
        drive.until(lambda number=number: len(taken) == number + 1)
    assert taken == [b"%d" % number for number in range(3010)]


def beside(context, name):
    """An inproc pair: a sent message has arrived and signalled at once."""
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    left.bind(f"inproc://{name}")
    right.connect(f"inproc://{name}")
    return left, right


def test_a_lone_message_is_answered_at_once_and_many_share_a_turn(loop, drive, context):
    taken, turns = [], []
    (one, says_one), (other, says_other) = beside(context, "one"), beside(context, "other")
    for socket in (one, other):
        loop.add_socket(socket, taking(socket, taken))
    loop.on_turn_end(lambda: turns.append(len(taken)))
    drive.until(lambda: turns)
    for number in (1, 2):  # the second time, after a quiet turn again
        says_one.send(b"1")
        drive.until(lambda number=number: number in turns)
    for _ in range(20):
        says_one.send(b"1")
    says_other.send(b"2")
    drive.until(lambda: len(taken) == 23)
    drive.spin(0.01)
    assert list(dict.fromkeys(turns)) == [0, 1, 2, 3, 23]


def test_a_report_that_signals_first_comes_after_the_messages(loop, drive, context):
    """The messages of a connection are handled before its end."""
    seen = []
    (messages, says), (reports, tells) = beside(context, "messages"), beside(context, "reports")
    loop.add_socket(messages, taking(messages, seen))
    loop.add_socket(reports, taking(reports, seen), sends=False)
    loop.on_turn_end(lambda: seen.append("end"))
    drive.until(lambda: seen)
    seen.clear()
    tells.send(b"gone")
    says.send(b"last words")
    drive.until(lambda: b"gone" in seen)
    assert seen.index(b"last words") < seen.index(b"gone")


@pytest.mark.integration
def test_a_raising_handler_gets_the_next_message(loop, drive, context):
    left, right = pair(context)
    taken = []
    take = taking(left, taken)

    def on_readable():
        took = take()
        if took and taken[-1] == b"bad":
            raise ValueError("bad message")
        return took

    loop.add_socket(left, on_readable)
    for body in (b"a", b"bad", b"b"):
        right.send(body)
    drive.until(lambda: len(taken) == 3)
    assert loop.callback_errors == 1


@pytest.mark.integration
def test_remove_socket_inside_its_handler(loop, drive, context):
    left, right = pair(context)
    taken = []
    take = taking(left, taken)

    def on_readable():
        took = take()
        if took:
            loop.remove_socket(left)
            left.close()
        return took

    loop.add_socket(left, on_readable)
    right.send(b"1")
    right.send(b"2")
    drive.until(lambda: taken)
    drive.spin(0.01)
    assert taken == [b"1"]
    assert loop.callback_errors == 0
