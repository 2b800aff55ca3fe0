"""The command's parser: what is wrong with a command line is said in one line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

EXIT_USAGE = 2

_SPELLED = (
    ("argument ", ""),
    ("the following arguments are required: ", "missing "),
)
"""What argparse's messages begin with, and what ours begin with instead."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line with a hint, not the whole usage.

    An option that does not exist is named before anything else, with the closest one. Options
    have to be written out: a beginning that is unique today may not be tomorrow.
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

    def parse_known_args(  # type: ignore[override]  # typeshed knows two overloads more
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's; exits for an option that this command does not have."""
        if args is not None and self._subparsers is None:
            self.refuse_unknown(args)
        return super().parse_known_args(args, namespace)

    def unexpected(self, words: Sequence[str]) -> NoReturn:
        """Exit for words that no argument takes."""
        self.refuse_unknown(words)
        self.error(f"unexpected argument {words[0]!r}")

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Exit for the first option that does not exist, with the closest that does."""
        known = self._option_string_actions
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                self.error(f"no option {name}{did_you_mean(name, known, '--')}")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=30)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """``; did you mean that?`` with what comes closest; empty if nothing does.

    ``prefix``: what ``word`` and all that is known begin with; it makes nothing similar.
    """
    bare = [name.removeprefix(prefix) for name in known]
    near = difflib.get_close_matches(word.removeprefix(prefix), bare, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A type for an option with these values."""

    def checked(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, not {text!r}")
        return text

    return checked


def shown(choices: Sequence[str]) -> str:
    """Choices as ``--help`` shows them."""
    return f"{{{','.join(choices)}}}"
