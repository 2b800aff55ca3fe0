"""A context's grammar matcher, kept in step with the tokens.

A matcher is anything with ``consume_token``: the engine's own, or a plain
``llguidance.LLMatcher``. Two habits of the latter matter here. A call that it refuses leaves it
unusable, so it is asked in a way that changes nothing first. And a token that follows the end of
its grammar is accepted but not counted, so a rollback must not count that token either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from .errors import InputError


class Matcher(Protocol):
    """Grammar state that follows the accepted tokens."""

    def consume_token(self, token: int) -> bool:
        """Advance by ``token``; False if the grammar does not allow it."""
        ...


@runtime_checkable
class RevocableMatcher(Protocol):
    """A matcher that can go back; a context with another one cannot be rolled back."""

    def rollback(self, count: int) -> bool | None:
        """Take back the last ``count`` tokens; ValueError or False if the matcher cannot."""
        ...


@runtime_checkable
class CopyableMatcher(Protocol):
    """A matcher that can be copied."""

    def deep_copy(self) -> RevocableMatcher:
        """A matcher in the same state."""
        ...


class Matched:
    """The matcher of a context; :class:`.TextContext` inherits it and has the field."""

    if not TYPE_CHECKING:  # `_matcher` is a slot of the class that inherits
        # No field of the dataclass: grammar state never travels and never compares.
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
        """Advance the matcher; ValueError, and nothing changes, if it refuses the token."""
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
        """Take the last ``count`` tokens back from the matcher.

        InputError, or what the matcher raises, when it cannot; it stands where it stood then.
        """
        matcher = self._matcher
        if matcher is None or not count:
            return
        if not isinstance(matcher, RevocableMatcher):
            raise InputError("cannot roll back: the context's matcher cannot go back")
        uncounted: int = getattr(self, "_uncounted", 0)
        counted = max(0, count - uncounted)
        if counted:
            _take_back(matcher, counted)
        self._uncounted = max(0, uncounted - count)


def _allows(matcher: Matcher, token: int, ended: bool) -> bool:
    """Ask llguidance's matcher without changing it; True for a matcher that needs no asking."""
    validate = getattr(matcher, "validate_tokens", None)
    if validate is None:
        return True
    # At the end of its grammar `validate_tokens` knows nothing of end tokens.
    return bool(
        cast("Any", matcher).deep_copy().consume_token(token) if ended else validate([token])
    )


def _take_back(matcher: RevocableMatcher, count: int) -> None:
    copied = matcher.deep_copy() if isinstance(matcher, CopyableMatcher) else None
    for one in (copied, matcher):
        if one is not None and one.rollback(count) is False:
            raise InputError(f"cannot roll back: the matcher cannot take back {count} tokens")
