"""A context's grammar matcher, kept consistent with the tokens.

A matcher is any object with ``consume_token``: the engine's matcher, or ``llguidance.LLMatcher``.
The latter has two properties that matter here. A refused token makes it unusable, so each token is
first validated without changing the matcher. And it accepts tokens after the end of its grammar
without counting them, so a rollback must not count them either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from ..errors import InputError


class Matcher(Protocol):
    """Grammar state that follows the accepted tokens."""

    def consume_token(self, token: int) -> bool:
        """Advance by ``token``; False if the grammar does not allow it."""
        ...


@runtime_checkable
class RevocableMatcher(Protocol):
    """A matcher that can roll back; a context with another matcher cannot be rolled back."""

    def rollback(self, count: int) -> bool | None:
        """Undo the last ``count`` tokens; ValueError or False if not possible."""
        ...


@runtime_checkable
class CopyableMatcher(Protocol):
    """A matcher that can be copied."""

    def deep_copy(self) -> RevocableMatcher:
        """Return a matcher in the same state."""
        ...


class Matched:
    """The matcher of a context; :class:`.TextContext` inherits this and has the field."""

    if not TYPE_CHECKING:  # `_matcher` is a slot of the class that inherits
        # Not a field of the dataclass: grammar state is neither sent nor compared.
        __slots__ = ("_uncounted",)

    _matcher: Matcher | None
    _uncounted: int  # last tokens that the matcher accepted without counting them

    @property
    def matcher(self) -> Matcher | None:
        """Grammar state, or None."""
        return self._matcher

    def set_matcher(self, matcher: Matcher) -> None:
        """Constrain the tokens by a grammar."""
        self._matcher = matcher
        self._uncounted = 0

    def _match(self, token: int) -> None:
        """Advance the matcher. Raises ValueError, without a change, if it refuses the token."""
        matcher = self._matcher
        if matcher is None:
            return
        is_stopped = getattr(matcher, "is_stopped", None)
        ended = is_stopped is not None and is_stopped()
        if not (_allows(matcher, token, ended) and matcher.consume_token(token)):
            raise ValueError(f"the grammar does not allow token {token}")
        if ended:
            self._uncounted = getattr(self, "_uncounted", 0) + 1

    def _unmatch(self, count: int) -> None:
        """Undo the last ``count`` tokens of the matcher.

        Raises InputError, or the matcher's error, without a change, if not possible.
        """
        matcher = self._matcher
        if matcher is None or not count:
            return
        if not isinstance(matcher, RevocableMatcher):
            raise InputError("cannot roll back: the context's matcher has no rollback")
        uncounted: int = getattr(self, "_uncounted", 0)
        counted = max(0, count - uncounted)
        if counted:
            _take_back(matcher, counted)
        self._uncounted = max(0, uncounted - count)


def _allows(matcher: Matcher, token: int, ended: bool) -> bool:
    """Validate a token without changing the matcher; True if it has no ``validate_tokens``."""
    validate = getattr(matcher, "validate_tokens", None)
    if validate is None:
        return True
    # After the end of the grammar, `validate_tokens` ignores end tokens.
    return bool(
        cast("Any", matcher).deep_copy().consume_token(token) if ended else validate([token])
    )


def _take_back(matcher: RevocableMatcher, count: int) -> None:
    copied = matcher.deep_copy() if isinstance(matcher, CopyableMatcher) else None
    for one in (copied, matcher):
        if one is not None and one.rollback(count) is False:
            raise InputError(f"cannot roll back: the matcher cannot undo {count} tokens")
