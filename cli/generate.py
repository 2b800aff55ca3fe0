"""``baton generate PROMPT``: stream one answer to standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..client import Client, Generation
from ..client.model import RequestOptions
from ..proto.errors import InputError
from .cluster import add_address, connect
from .numbers import seconds
from .sampling import add_sampling, sampling_of


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the verb."""
    parser = verbs.add_parser("generate", help="continue a prompt")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text; without it, stdin")
    parser.add_argument("--chat", action="store_true", help="put it into the chat template")
    add_address(parser)
    add_sampling(parser, max_new_tokens=128)
    parser.add_argument("--target-endpoint", metavar="ADDRESS", help="use this worker")
    parser.add_argument("--json-schema", metavar="FILE", help="answer with an instance of it")
    parser.add_argument("--deadline", type=seconds, metavar="SECONDS", help="end it by then")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Stream the answer's text, then a newline."""
    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    if not prompt:
        raise InputError("the prompt is empty; give text or pipe it in")
    with connect(arguments) as client, _start(client, prompt, arguments) as generation:
        for output in generation:
            print(output.text or "", end="", flush=True)
    print()
    return 0


def _start(client: Client, prompt: str, arguments: argparse.Namespace) -> Generation:
    params = sampling_of(arguments)
    options: RequestOptions = {
        "target_endpoint": arguments.target_endpoint,
        "deadline": arguments.deadline,
        "json_schema": _schema(arguments.json_schema),
    }
    if arguments.chat:
        return client.chat([{"role": "user", "content": prompt}], params, **options)
    return client.generate(prompt, params, **options)


def _schema(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
