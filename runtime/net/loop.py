"""Event loop of one thread: ZeroMQ sockets, descriptors, timers, and posts from other threads.

ZeroMQ's descriptor is edge-triggered: it signals changes of state, and any call on the socket,
even a send, can consume the signal. So after every activity the loop polls all sockets until none
is readable. A socket used only by its handler, such as a monitor's, keeps its signals; it is polled
only after a signal, since each poll costs two system calls.

Invariant: a message that has arrived is handled without a further signal. If a callback raises, the
exception is logged and counted; the loop and the other callbacks continue.

All methods except :meth:`Loop.post` must be called on the loop's thread.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvloop
import zmq

from ..process.log import get_logger

MESSAGES_PER_VISIT = 100
"""Maximum messages read from one socket before the next socket is visited."""
POLLED_PER_VISIT = 4
"""First messages of a visit after which the socket is polled: a poll costs an eighth of a receive
without a message."""
PASSES_PER_TURN = 8
"""Maximum rounds over all sockets before timers and descriptors are handled."""
RETRY_S = 0.1
"""Seconds until a descriptor is watched again whose callback raised."""

_POLLIN = int(zmq.POLLIN)
_log = get_logger()

Callback = Callable[[], object]


class Timer:
    """A callback at a time of :meth:`Loop.now`; never called early or twice."""

    __slots__ = ("_callback", "_handle", "_loop", "when")

    def __init__(self, loop: Loop, when: float, callback: Callback) -> None:
        self._loop = loop
        self._callback: Callback | None = callback
        self.when = when
        self._handle: asyncio.TimerHandle | None = None
        self._arm()

    def cancel(self) -> None:
        """Cancel the callback; no effect after it was called."""
        self._callback = None
        if self._handle is not None:
            self._handle.cancel()

    def _arm(self) -> None:
        # libuv counts whole milliseconds from the start of its iteration, so a timer may fire
        # early by the time elapsed in this iteration; then _fire rearms it.
        delay = math.ceil(max(0.0, self.when - time.monotonic()) * 1000) / 1000
        self._handle = self._loop.asyncio_loop.call_later(delay, self._fire)

    def _fire(self) -> None:
        callback = self._callback
        if callback is None:
            return
        if time.monotonic() < self.when:
            self._arm()
            return
        self._callback = None
        self._loop.guarded(callback)
        self._loop.turn_soon()


class Periodic:
    """A callback that is called again and again, also after it raised.

    The next call is scheduled before the callback runs, so no exception can stop it.
    """

    __slots__ = ("_callback", "_loop", "_seconds", "_timer")

    def __init__(self, loop: Loop, first: float, seconds: float, callback: Callback) -> None:
        self._loop = loop
        self._seconds = seconds
        self._callback = callback
        self._timer = loop.call_later(first, self._fire)

    def cancel(self) -> None:
        """Stop; also from within the callback."""
        self._timer.cancel()

    def _fire(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._fire)
        self._callback()


class _Source:
    """One registered socket."""

    __slots__ = ("ask", "closed", "fd", "on_readable", "polled", "sends", "socket")

    def __init__(
        self, socket: zmq.Socket[bytes], on_readable: Callable[[], bool], *, sends: bool
    ) -> None:
        self.socket = socket
        self.polled = [(socket, _POLLIN)]
        self.on_readable = on_readable
        self.fd = cast("int", socket.getsockopt(zmq.FD))
        self.sends = sends
        self.ask = True  # poll in the next turn: always if sends, else after a signal
        self.closed = False


class Loop:
    """Event loop of one thread.

    Without an argument it owns a uvloop, which :meth:`run` drives. With a running asyncio loop it
    runs inside that loop.
    """

    def __init__(self, asyncio_loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._owned = asyncio_loop is None
        self.asyncio_loop = asyncio_loop or uvloop.new_event_loop()
        self.callback_errors = 0
        self._sources: list[_Source] = []
        self._turn_end: list[Callback] = []
        self._in_turn = False
        self._quiet = True  # the last turn had at most one message, and no more are waiting
        self._turn_soon = False
        self._wake_lock = threading.RLock()  # reentrant: a finalizer may post during a post
        self._posted: deque[Callback] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.asyncio_loop.add_reader(self._wake_fd, self._on_wake)
        self._fds: dict[int, Callback] = {}
        self._signals: dict[int, Any] = {}  # signal number: previous handler
        self._closed = False

    # ------------------------------------------------------------------ what to watch

    def add_socket(
        self,
        socket: zmq.Socket[bytes],
        on_readable: Callable[[], bool],
        *,
        sends: bool = True,
    ) -> None:
        """Call ``on_readable`` while ``socket`` has messages.

        ``on_readable`` handles one message without blocking and returns True; without a message, it
        returns False. ``sends``: whether other code uses the socket too, for example to send. If
        not, no signal is lost, and the socket is polled only after a signal.
        """
        source = _Source(socket, on_readable, sends=sends)
        self._sources.append(source)
        self.asyncio_loop.add_reader(source.fd, self._on_signal, source)
        self.turn_soon()  # messages that arrived before the registration give no signal

    def remove_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Unregister ``socket``; call before closing it."""
        for source in [s for s in self._sources if s.socket is socket]:
            source.closed = True
            self._sources.remove(source)
            self.asyncio_loop.remove_reader(source.fd)

    def add_fd(self, fd: int, callback: Callback) -> None:
        """Call ``callback`` whenever ``fd`` is readable; after an exception, in ``RETRY_S``.

        A callback that raises leaves ``fd`` readable. Called at once, it would fill the log.
        """
        self._fds[fd] = callback
        self.asyncio_loop.add_reader(fd, self._on_event, fd, callback)

    def remove_fd(self, fd: int) -> None:
        """Unregister ``fd``."""
        self._fds.pop(fd, None)
        self.asyncio_loop.remove_reader(fd)

    def on_signal(self, number: int, callback: Callback) -> None:
        """Call ``callback`` at every signal ``number`` until :meth:`close`. Main thread only.

        Unlike uvloop's own handlers, this also handles signals that arrive before :meth:`run`.
        """
        before = signal.signal(number, lambda _number, _frame: self.post(callback))
        self._signals.setdefault(number, before)

    def on_turn_end(self, callback: Callback) -> None:
        """Call ``callback`` at the end of every turn, for example to flush outgoing messages."""
        self._turn_end.append(callback)

    # ------------------------------------------------------------------ time and threads

    @staticmethod
    def now() -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def call_at(self, when: float, callback: Callback) -> Timer:
        """Call once at ``when`` (seconds of :meth:`now`)."""
        return Timer(self, when, callback)

    def call_later(self, delay: float, callback: Callback) -> Timer:
        """Call once after ``delay`` seconds."""
        return Timer(self, time.monotonic() + delay, callback)

    def every(self, seconds: float, callback: Callback, *, first: float | None = None) -> Periodic:
        """Call every ``seconds``, whatever the callback raises. ``first``: seconds until then."""
        return Periodic(self, seconds if first is None else first, seconds, callback)

    def post(self, callback: Callback) -> None:
        """Run ``callback`` on the loop's thread soon; safe from any thread."""
        self._posted.append(callback)
        with self._wake_lock:  # after close() the descriptor number may be reused
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------------ life

    def run(self) -> None:
        """Run until :meth:`stop`, then close the loop."""
        try:
            self.asyncio_loop.run_forever()
        finally:
            self.close()

    def stop(self) -> None:
        """Make :meth:`run` return after this turn; safe to call more than once."""
        self.asyncio_loop.call_soon(self.asyncio_loop.stop)

    def close(self) -> None:
        """Unregister everything; the owners of the sockets close them."""
        if self._closed:
            return
        for number, before in self._signals.items():
            signal.signal(number, before)
        with self._wake_lock:
            self._closed = True
        for source in list(self._sources):
            self.remove_socket(source.socket)
        self.asyncio_loop.remove_reader(self._wake_fd)
        os.close(self._wake_fd)
        if self._owned:
            self.asyncio_loop.close()

    # ------------------------------------------------------------------ turns

    def guarded(self, callback: Callback) -> bool:
        """Run ``callback``; an exception is logged with its traceback, counted, and gives False."""
        try:
            callback()
        except Exception:
            self._failed(callback)
            return False
        return True

    def turn_soon(self) -> None:
        """Visit the sockets and end the turn in the loop's next iteration."""
        if not self._turn_soon and not self._in_turn:
            self._turn_soon = True
            self.asyncio_loop.call_soon(self._turn)

    def _on_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
        for _ in range(len(self._posted)):
            self.guarded(self._posted.popleft())
        self._turn()

    def _on_signal(self, source: _Source) -> None:
        source.ask = True
        self._turn(source)

    def _on_event(self, fd: int, callback: Callback) -> None:
        if not self.guarded(callback) and self._fds.get(fd) is callback:
            self.asyncio_loop.remove_reader(fd)
            self.call_later(RETRY_S, partial(self._watch_again, fd, callback))
        self.turn_soon()

    def _watch_again(self, fd: int, callback: Callback) -> None:
        if self._fds.get(fd) is callback:
            self.asyncio_loop.add_reader(fd, self._on_event, fd, callback)

    def _turn(self, signalled: _Source | None = None) -> None:
        """Handle messages up to the limits, then flush; remaining ones are handled next turn."""
        if self._in_turn or self._closed:
            return
        self._turn_soon = False
        self._in_turn = True
        try:
            taken = self._take(signalled)
            for callback in self._turn_end:
                self.guarded(callback)
        finally:
            self._in_turn = False
        # The flush sent messages, which may consume signals: poll once more before sleeping.
        more = any(source.ask and self._readable(source) for source in tuple(self._sources))
        if taken:
            self._quiet = taken < 2 and not more
        if more:
            self.turn_soon()

    def _take(self, signalled: _Source | None) -> int:
        """Handle messages and return their number.

        While messages arrive one at a time, only the signalled socket has one, so it is handled
        without polling any socket. A monitor's report is not: the last messages of a connection
        must be handled before its end.
        """
        lone = self._quiet and signalled is not None and signalled.sends
        if lone and signalled is not None and self._take_one(signalled):
            return 1
        taken = 0
        for _ in range(PASSES_PER_TURN):
            found = self._visit_all()
            taken += found
            if found < 2:
                break  # answer a single message at once; under load, look for more
        return taken

    def _take_one(self, source: _Source) -> bool:
        try:
            return not source.closed and source.on_readable()
        except Exception:
            self._failed(source.on_readable)
            return True

    def _visit_all(self) -> int:
        """Visit every readable socket; return the number of messages handled."""
        taken = 0
        for source in tuple(self._sources):
            if source.ask and not source.closed and self._readable(source):
                taken += self._visit(source)
        return taken

    def _visit(self, source: _Source) -> int:
        for taken in range(MESSAGES_PER_VISIT):
            try:
                if source.closed or not source.on_readable():
                    return taken
            except Exception:
                self._failed(source.on_readable)
            if taken < POLLED_PER_VISIT and not self._readable(source):
                return taken + 1
        return MESSAGES_PER_VISIT

    def _readable(self, source: _Source) -> bool:
        """Poll the socket; this consumes its signals."""
        try:
            closed = source.socket.closed  # zmq_poll would ask descriptor 0
            # A third of the instructions of the option EVENTS, which goes through two enums.
            readable = not closed and bool(zmq.zmq_poll(source.polled, 0))
        except zmq.ZMQError:
            closed, readable = True, False
        if closed:  # by its owner, without remove_socket
            self.remove_socket(source.socket)
            return False
        source.ask = readable or source.sends
        return readable

    def _failed(self, callback: object) -> None:
        self.callback_errors += 1
        name = getattr(callback, "__qualname__", repr(callback))
        _log.exception("loop.callback_failed", callback=name)
