"""The argument parser, which reports an error in a command line in one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from .output import say

EXIT_USAGE = 2

_SPELLED = (
    ("argument ", ""),
    ("the following arguments are required: ", "missing "),
)
"""Beginnings of argparse's messages, and their replacements in our messages."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error as one line with a hint, without the usage text.

    An unknown option is reported before other errors, with the closest known option. Options
    cannot be abbreviated: a new option could make an abbreviation ambiguous.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"allow_abbrev": False, "formatter_class": _formatter}
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        for theirs, ours in _SPELLED:
            if message.startswith(theirs):
                message = ours + message.removeprefix(theirs)
        hint = "" if message.endswith("?") else f"; see {self.prog} --help"
        self.exit(EXIT_USAGE, f"{self.prog}: {message}{hint}\n")

    def parse_known_args(  # type: ignore[override]  # typeshed has two more overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse like argparse, but exit for an option that this command does not have."""
        if args is not None and self._subparsers is None:
            self.refuse_unknown(args)
        return super().parse_known_args(args, namespace)

    def unexpected(self, words: Sequence[str]) -> NoReturn:
        """Exit with an error about words that no argument takes."""
        self.refuse_unknown(words)
        self.error(f"unexpected argument {words[0]!r}")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Exit if a word is an unknown option, and name the closest known option."""
        known = self._option_string_actions
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                self.error(f"no option {name}{did_you_mean(name, known, '--')}")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=30)


def warn(message: str) -> None:
    """Print a warning to standard error."""
    say(f"baton: warning: {message}", error=True)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``; did you mean NAME?`` with the closest known name, or an empty string.

    ``prefix``: common beginning of ``word`` and all known names, ignored in the comparison.
    """
    bare = [name.removeprefix(prefix) for name in known]
    near = difflib.get_close_matches(word.removeprefix(prefix), bare, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return the type function of an option that takes one of ``choices``."""

    def checked(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, not {text!r}")
        return text

    return checked


def shown(choices: Sequence[str]) -> str:
    """Choices as ``--help`` shows them."""
    return f"{{{','.join(choices)}}}"
