"""``baton generate PROMPT``: stream one answer to standard output."""

from __future__ import annotations

import argparse
import json
import sys

from baton.client import Client, Generation
from baton.client.options import RequestOptions
from baton.proto.errors import ConfigError
from baton.runtime.small_files import read_small

from .cluster import add_address, add_deadline, connect
from .output import shown_text
from .sampling import add_sampling, sampling_of


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = verbs.add_parser("generate", help="continue a prompt")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text [standard input]")
    parser.add_argument("--chat", action="store_true", help="apply the chat template")
    add_address(parser)
    add_sampling(parser, max_new_tokens=128)
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="image of the prompt, which needs one placeholder for each unless --chat is given; "
        "may be repeated",
    )
    parser.add_argument(
        "--target-endpoint", metavar="ADDRESS", help="send the request to this worker"
    )
    parser.add_argument(
        "--json-schema", metavar="FILE", help="constrain the answer to this JSON schema"
    )
    add_deadline(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Stream the answer's text, then a newline."""
    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    if not prompt:
        raise ConfigError("the prompt is empty; give PROMPT or pipe text to standard input")
    with connect(arguments) as client, _start(client, prompt, arguments) as generation:
        for output in generation:
            print(shown_text(output.text), end="", flush=True)
    print()
    return 0


def _start(client: Client, prompt: str, arguments: argparse.Namespace) -> Generation:
    params = sampling_of(arguments)
    options: RequestOptions = {
        "target_endpoint": arguments.target_endpoint,
        "deadline": arguments.deadline,
        "json_schema": _schema(arguments.json_schema),
        "images": arguments.image,
    }
    if arguments.chat:
        return client.chat([{"role": "user", "content": prompt}], params, **options)
    return client.generate(prompt, params, **options)


def _schema(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        text = read_small(file).decode()
        json.loads(text)
    except OSError as problem:
        raise ConfigError(f"cannot read {file}: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{file} is not UTF-8 text: {problem.reason}") from None
    except ValueError as problem:
        raise ConfigError(f"{file} is not JSON: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply") from None
    return text
