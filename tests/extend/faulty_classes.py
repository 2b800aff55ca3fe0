"""Classes of extension points that fail in every way; tests name them in settings."""

import sys
import time

from baton.extend import counter


class Raises:
    """Raises in every method."""

    def choose(self, request, workers):
        raise KeyError(f"no rack for {request.request_id}")

    def local(self, ways):
        raise ValueError("no decision")

    def rank(self, prompt):
        raise ZeroDivisionError("no rank")

    def ended(self, request):
        raise LookupError("no count")

    def families(self):
        raise RuntimeError("no metric")


class FailsToPut:
    """A transport that keeps nothing."""

    def put(self, payload):
        raise OSError("the disk is full")

    def get(self, ticket, size):
        raise AssertionError("there is no ticket")


class LosesSome:
    """A transport in memory that two processes do not share: every second ticket is lost."""

    def __init__(self):
        self.calls = 0

    def put(self, payload):
        self.calls += 1
        if self.calls % 2:
            return b"lost"
        raise OSError("the disk is full")

    def get(self, ticket, size):
        raise FileNotFoundError(ticket)


class Exits:
    """Ends the process, if it can."""

    def choose(self, request, workers):
        sys.exit(3)


class Nonsense:
    """Returns what no caller can use."""

    def choose(self, request, workers):
        return workers

    def local(self, ways):
        return "yes"

    def rank(self, prompt):
        return float("nan")

    def ended(self, request):
        return 5

    def families(self):
        return [counter("baton_requests_total", "Takes the name of another metric.", 1.0)]


class Remembers:
    """Returns the first worker that it was ever given, also after its death."""

    def __init__(self):
        self.first = {}

    def choose(self, request, workers):
        return self.first.setdefault(request.role, workers[0])


class Hangs:
    """Never returns."""

    def choose(self, request, workers):
        while True:
            pass


class Slow:
    """Takes 50 ms for every call."""

    def choose(self, request, workers):
        time.sleep(0.05)
        return workers[-1]

    def local(self, ways):
        time.sleep(0.05)
        return True

    def rank(self, prompt):
        time.sleep(0.05)
        return 0.0

    def ended(self, request):
        time.sleep(0.05)

    def families(self):
        time.sleep(0.05)
        return []


class ByTurns:
    """Raises, returns a worker of the past, sleeps for 50 ms, or makes a good choice, by turns."""

    def __init__(self):
        self.calls = 0
        self.first = {}

    def choose(self, request, workers):
        self.calls += 1
        self.first.setdefault(request.role, workers[0])
        if self.calls % 4 == 1:
            raise KeyError("a rack that is not here")
        if self.calls % 4 == 3:
            time.sleep(0.05)
        return self.first[request.role] if self.calls % 4 == 2 else workers[-1]
