"""The ``baton`` command: parse, run one verb, turn errors into one line and an exit code.

Exit codes: 0 done, 1 failed (one line says what to do), 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from baton import __version__

from ..proto.errors import BatonError, ConfigError
from . import (
    chat,
    demo,
    doctor,
    down,
    drain,
    embed,
    generate,
    keygen,
    launch,
    ray_config,
    rollout,
    scale,
    serve,
    status,
    wait_ready,
)
from .streams import prepare_streams, silence_output

VERBS = (
    serve, launch, demo, generate, chat, embed, status, wait_ready, scale, drain, rollout, down,
    keygen, ray_config, doctor,
)  # fmt: skip

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serve language models with separate prefill and decode workers.",
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    parser.add_argument("--debug", action="store_true", help="show a traceback when it fails")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    prepare_streams()
    arguments = build_parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # a full disk or a gone reader shows itself here at the latest
        return code
    except BatonError as problem:
        if arguments.debug:
            raise
        print(f"baton: {problem}{_hint(problem)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(problem, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence_output()  # whoever read it has seen enough
        return 0
    except OSError as problem:
        if arguments.debug:
            raise
        silence_output()
        print(f"baton: {problem.strerror or problem}{_place(problem)}", file=sys.stderr)
        return EXIT_FAILED


def _hint(problem: BatonError) -> str:
    return "" if problem.retry_after is None else f" (try again in {problem.retry_after:.1f} s)"


def _place(problem: OSError) -> str:
    return "" if problem.filename is None else f": {problem.filename}"
