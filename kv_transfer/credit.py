"""Byte credit: limits the bytes that all senders of one receiver have in flight together.

Invariant: the sum over all grants of (credit - bytes received) never exceeds the budget. So
the receiver's memory for KV in flight is bounded, even if a sender misbehaves. Credit is
cumulative per grant, so a repeated credit message changes nothing.

Grants are served in order of arrival. A grant is served once its whole window fits into the
budget, and it keeps that reservation. Otherwise many grants could each hold a remainder smaller
than one frame, and none of them could send.
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
    """Share ``budget`` bytes among grants, at most ``window`` each, first come first served."""

    def __init__(self, budget: int, window: int) -> None:
        self._budget = budget
        self._window = min(window, budget)
        self._outstanding = 0
        self._reserved = 0  # sum of _share() over the served accounts
        self._accounts: OrderedDict[int, _Account] = OrderedDict()
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._news: dict[int, int] = {}  # raised credits, not yet returned by open() or top_up()

    @property
    def outstanding(self) -> int:
        """Bytes of credit that have been granted but not received yet."""
        return self._outstanding

    def open(self, key: int, expected: int) -> int:
        """Start an account for ``expected`` bytes and return its first credit (may be 0)."""
        self._accounts[key] = _Account(expected)
        self._waiting[key] = None
        self._serve()
        return self._news.pop(key, 0)

    def close(self, key: int) -> None:
        """Remove an account and return its unused credit to the pool."""
        account = self._accounts.pop(key, None)
        if account:
            self._waiting.pop(key, None)
            self._news.pop(key, None)
            self._outstanding -= account.outstanding
            self._reserved -= self._share(account)

    def receive(self, key: int, nbytes: int) -> bool:
        """Book received bytes. Return False and book nothing if they exceed the credit."""
        account = self._accounts[key]
        if account.received + nbytes > account.credit:
            return False
        self._reserved -= self._share(account)
        account.received += nbytes
        self._reserved += self._share(account)
        self._outstanding -= nbytes
        return True

    def counted(self, key: int) -> int:
        """Credit already used, in bytes: received or written off as lost; 0 for a closed key."""
        account = self._accounts.get(key)
        return 0 if account is None else account.received

    def expect_again(self, key: int, nbytes: int) -> int:
        """Write off the bytes in flight as lost, expect ``nbytes`` more, return the new credit.

        If the budget has no room now, the credit is raised later by :meth:`top_up`. The account
        moves to the head of the queue, because its handoff is already under way.
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
        """Raise credits that ran low. Return ``(key, new cumulative credit)`` for each raise."""
        self._serve()
        for key, account in self._accounts.items():
            low = account.served and account.outstanding * 2 <= self._window
            if low and account.credit < account.expected:
                self._raise(key, account)
        raised, self._news = self._news, {}
        return list(raised.items())

    def check_integrity(self) -> None:
        """Raise InternalError if the sums disagree with the accounts or exceed the budget."""
        accounts = self._accounts.values()
        outstanding = sum(account.outstanding for account in accounts)
        reserved = sum(self._share(account) for account in accounts)
        if (outstanding, reserved) != (self._outstanding, self._reserved):
            raise InternalError("the credit sums do not match the accounts")
        if not 0 <= outstanding <= reserved <= self._budget:
            text = f"{outstanding} bytes of credit outstanding, {reserved} reserved"
            raise InternalError(f"{text}, budget {self._budget}")

    def _share(self, account: _Account) -> int:
        """Bytes of the budget that a served account reserves: its largest outstanding credit."""
        return min(self._window, account.expected - account.received) if account.served else 0

    def _serve(self) -> None:
        """Serve waiting accounts in order while their shares fit into the budget."""
        while self._waiting:
            key = next(iter(self._waiting))
            account = self._accounts[key]
            account.served = True  # _share() is 0 for an account that is not served
            share = self._share(account)
            if self._reserved + share > self._budget:
                account.served = False
                break
            del self._waiting[key]
            self._reserved += share
            self._raise(key, account)

    def _raise(self, key: int, account: _Account) -> None:
        """Raise the credit to a full window. :meth:`_serve` reserved the bytes before."""
        room = min(account.expected - account.credit, self._window - account.outstanding)
        if room > 0:
            account.credit += room
            self._outstanding += room
            self._news[key] = account.credit
