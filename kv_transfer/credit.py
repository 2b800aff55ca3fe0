"""Byte credit: how much the senders of one receiver may have in flight.

Invariant: the sum over all grants of (credit given - bytes received) never exceeds the
budget, so a receiver's memory for KV in flight is bounded whatever its senders do. Credit
is cumulative per grant; giving it twice does nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    expected: int  # bytes the whole transfer will need
    credit: int = 0
    received: int = 0

    @property
    def outstanding(self) -> int:
        return max(0, self.credit - self.received)


class CreditPool:
    """Shares ``budget`` bytes among grants, at most ``window`` each, first come first served."""

    def __init__(self, budget: int, window: int) -> None:
        self._budget = budget
        self._window = window
        self._outstanding = 0
        self._accounts: OrderedDict[int, _Account] = OrderedDict()

    @property
    def outstanding(self) -> int:
        """Bytes that may still arrive without further credit."""
        return self._outstanding

    def open(self, key: int, expected: int) -> int:
        """Start an account for ``expected`` bytes; returns its first credit (may be 0)."""
        self._accounts[key] = _Account(expected)
        self._raise(key)
        return self._accounts[key].credit

    def close(self, key: int) -> None:
        """Forget an account; its unused credit returns to the pool."""
        account = self._accounts.pop(key, None)
        if account:
            self._outstanding -= account.outstanding

    def receive(self, key: int, nbytes: int) -> bool:
        """Book arrived bytes; False when the sender exceeds its credit (nothing is booked)."""
        account = self._accounts[key]
        if account.received + nbytes > account.credit:
            return False
        account.received += nbytes
        self._outstanding -= nbytes
        return True

    def expect_more(self, key: int, nbytes: int) -> int:
        """Frames must be sent again: give credit for them at once; returns the new credit."""
        account = self._accounts[key]
        account.expected += nbytes
        account.credit += nbytes
        self._outstanding += nbytes
        return account.credit

    def top_up(self) -> list[tuple[int, int]]:
        """Raise credits that ran low: ``(key, new cumulative credit)`` of those that changed."""
        raised = []
        for key, account in self._accounts.items():
            low = account.outstanding * 2 <= self._window
            if low and account.credit < account.expected and self._raise(key):
                raised.append((key, account.credit))
        return raised

    def _raise(self, key: int) -> bool:
        account = self._accounts[key]
        room = min(
            account.expected - account.credit,
            self._window - account.outstanding,
            self._budget - self._outstanding,
        )
        if room <= 0:
            return False
        account.credit += room
        self._outstanding += room
        return True
