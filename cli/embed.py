"""``baton embed TEXT...``: print one embedding per text, as JSON lines on standard output."""

from __future__ import annotations

import argparse
import json
import sys

from .cluster import add_address, add_deadline, connect


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("embed", help="print embeddings of texts, one JSON array per line")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="texts [the lines of stdin]")
    add_address(parser)
    add_deadline(parser)
    parser.set_defaults(run=run)


def _lines(text: str) -> list[str]:
    """Split at line feeds only: ``str.splitlines`` would also split at Unicode line ends."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def run(arguments: argparse.Namespace) -> int:
    """Print the embeddings in the order of the texts."""
    texts = arguments.texts or _lines(sys.stdin.read())
    with connect(arguments) as client:
        for vector in client.embed(texts, deadline=arguments.deadline):
            print(json.dumps([round(float(value), 8) for value in vector]))
    return 0
