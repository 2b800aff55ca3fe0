"""Byte credit: how much the senders of one receiver may have in flight.

Invariant: the sum over all grants of (credit given - bytes received) never exceeds the
budget, so a receiver's memory for KV in flight is bounded whatever its senders do. Credit
is cumulative per grant; giving it twice does nothing.

A grant is served when its whole window has room in the budget, in order of arrival, and
keeps that room; crumbs too small for a frame are never all that everybody has.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..proto.errors import InternalError


@dataclass(slots=True)
class _Account:
    expected: int  # bytes the whole transfer will need
    credit: int = 0
    received: int = 0
    served: bool = False

    @property
    def outstanding(self) -> int:
        return self.credit - self.received


class CreditPool:
    """Shares ``budget`` bytes among grants, at most ``window`` each, first come first served."""

    def __init__(self, budget: int, window: int) -> None:
        self._budget = budget
        self._window = min(window, budget)
        self._outstanding = 0
        self._reserved = 0  # what the served accounts may have outstanding at most
        self._accounts: OrderedDict[int, _Account] = OrderedDict()
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._news: dict[int, int] = {}  # raised credits that :meth:`top_up` has not told yet

    @property
    def outstanding(self) -> int:
        """Bytes that may still arrive without further credit."""
        return self._outstanding

    def open(self, key: int, expected: int) -> int:
        """Start an account for ``expected`` bytes; returns its first credit (may be 0)."""
        self._accounts[key] = _Account(expected)
        self._waiting[key] = None
        self._serve()
        return self._news.pop(key, 0)

    def close(self, key: int) -> None:
        """Forget an account; its unused credit returns to the pool."""
        account = self._accounts.pop(key, None)
        if account:
            self._waiting.pop(key, None)
            self._news.pop(key, None)
            self._outstanding -= account.outstanding
            self._reserved -= self._share(account)

    def receive(self, key: int, nbytes: int) -> bool:
        """Book arrived bytes; False when the sender exceeds its credit (nothing is booked)."""
        account = self._accounts[key]
        if account.received + nbytes > account.credit:
            return False
        self._reserved -= self._share(account)
        account.received += nbytes
        self._reserved += self._share(account)
        self._outstanding -= nbytes
        return True

    def counted(self, key: int) -> int:
        """Bytes of the credit that are used up: arrived, or given up as lost; 0 when closed."""
        account = self._accounts.get(key)
        return 0 if account is None else account.received

    def expect_again(self, key: int, nbytes: int) -> int:
        """What is under way counts as lost and ``nbytes`` are to come; returns the new credit.

        What the budget does not allow at once follows with :meth:`top_up`.
        """
        account = self._accounts[key]
        self._outstanding -= account.outstanding
        self._reserved -= self._share(account)
        account.received = account.credit
        account.expected = account.credit + nbytes
        account.served = False
        self._waiting[key] = None
        self._waiting.move_to_end(key, last=False)
        self._serve()
        return self._news.pop(key, account.credit)

    def top_up(self) -> list[tuple[int, int]]:
        """Raise credits that ran low: ``(key, new cumulative credit)`` of those that changed."""
        self._serve()
        for key, account in self._accounts.items():
            low = account.served and account.outstanding * 2 <= self._window
            if low and account.credit < account.expected:
                self._raise(key, account)
        raised, self._news = self._news, {}
        return list(raised.items())

    def check_integrity(self) -> None:
        """Raise InternalError unless the sums are right and within the budget."""
        accounts = self._accounts.values()
        outstanding = sum(account.outstanding for account in accounts)
        reserved = sum(self._share(account) for account in accounts)
        if (outstanding, reserved) != (self._outstanding, self._reserved):
            raise InternalError("the sums of credit do not fit the accounts")
        if not 0 <= outstanding <= reserved <= self._budget:
            text = f"{outstanding} bytes of credit are out and {reserved} reserved"
            raise InternalError(f"{text}, the budget is {self._budget}")

    def _share(self, account: _Account) -> int:
        """What an account may have outstanding at most, now or later."""
        return min(self._window, account.expected - account.received) if account.served else 0

    def _serve(self) -> None:
        """Serve those that wait, in order, while their shares fit."""
        while self._waiting:
            key = next(iter(self._waiting))
            account = self._accounts[key]
            account.served = True
            share = self._share(account)
            if self._reserved + share > self._budget:
                account.served = False
                break
            del self._waiting[key]
            self._reserved += share
            self._raise(key, account)

    def _raise(self, key: int, account: _Account) -> None:
        """Up to a full window; its share of the budget was reserved before."""
        room = min(account.expected - account.credit, self._window - account.outstanding)
        if room > 0:
            account.credit += room
            self._outstanding += room
            self._news[key] = account.credit
