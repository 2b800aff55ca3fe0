"""``baton chat``: a conversation on the terminal, or with messages from standard input."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any

from baton.client import Client
from baton.proto.errors import BatonError
from baton.proto.sampling import SamplingParamsInput

from .cluster import add_address, connect
from .output import say, shown_text
from .parser import did_you_mean
from .sampling import add_sampling, sampling_of

HELP = (
    "/help: list these commands; /reset: start a new conversation; /quit: exit; "
    "Ctrl-C: cancel the answer"
)
COMMANDS = ("/help", "/reset", "/quit")
_COMMAND = re.compile(r"/[a-z]+")
"""A line that is one word like a command: probably a mistake, so it is not sent to the model."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("chat", help="chat with the model", epilog=HELP)
    add_address(parser)
    add_sampling(parser, max_new_tokens=256)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="image in front of the first line of a conversation; may be repeated",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer each line of the input until its end.

    If a line cannot be answered, print the error and remove the line from the conversation. If
    standard input is not a terminal, such an error makes the exit code 1.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        print(HELP)
    first = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages: list[dict[str, Any]] = list(first)
    params = sampling_of(arguments)
    failures = 0
    with connect(arguments) as client:
        for line in read_lines(prompt="you> " if interactive else ""):
            if _COMMAND.fullmatch(line):
                if line == "/reset":
                    messages = list(first)
                elif line == "/help":
                    print(HELP, flush=True)
                else:
                    hint = did_you_mean(line, COMMANDS, "/") or "; /help lists the commands"
                    print(f"baton: no chat command {line}{hint}", file=sys.stderr, flush=True)
                    failures += 1
                continue
            messages.append({"role": "user", "content": _content(line, messages, arguments.image)})
            try:
                reply = answer(client, messages, params)
            except BatonError as problem:
                say(f"baton: {problem}", error=True)
                messages.pop()
                failures += 1
                continue
            messages.append({"role": "assistant", "content": reply})
    return 1 if failures and not interactive else 0


def _content(line: str, messages: list[dict[str, Any]], images: list[str]) -> Any:
    """Return the content of a message: its text, and the images if it is the user's first."""
    if not images or any(message["role"] == "user" for message in messages):
        return line
    return [*({"type": "image", "image": one} for one in images), {"type": "text", "text": line}]


def read_lines(prompt: str) -> Iterator[str]:
    """Yield the lines that are not blank, until /quit or the end of the input."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line


def answer(client: Client, messages: list[dict[str, Any]], params: SamplingParamsInput) -> str:
    """Stream one answer and return its text. Ctrl-C cancels only this answer."""
    parts: list[str] = []
    with client.chat(messages, params) as generation:
        try:
            for output in generation:
                parts.append(output.text)
                print(shown_text(parts[-1]), end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
    print()
    return "".join(parts)
