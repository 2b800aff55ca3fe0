"""``baton completion SHELL``: print a script that completes commands, options and files on TAB.

The script holds all names, so no Baton process runs while a user types.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from .parser import one_of, shown

SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "WHEEL")
_FOLDERS = ("FOLDER", "MODEL")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        epilog='bash: eval "$(baton completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, '
        "after compinit. fish: baton completion fish > ~/.config/fish/completions/baton.fish",
    )
    parser.add_argument(
        "shell", type=one_of(SHELLS), metavar=shown(SHELLS), help="the shell of the script"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from .command import build_parser  # imports this module for its parser

    print(script(build_parser(), arguments.shell))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script of one shell for a parser with all commands."""
    import shtab

    for action in _actions(parser):
        name = str(action.metavar or "")
        if name.startswith("{"):
            action.choices = name.strip("{}").split(",")
        elif name in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # how shtab is told
        elif name in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
