"""The ``baton`` command: parse, run one verb, turn errors into one line and an exit code.

Exit codes: 0 done, 1 failed (one line says what to do), 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from baton import __version__

from ..proto.errors import BatonError, ConfigError
from .streams import prepare_streams, silence_output

VERBS = (
    "serve", "launch", "demo", "generate", "chat", "embed", "status", "wait-ready", "scale",
    "drain", "rollout", "down", "keygen", "ray-config", "doctor",
)  # fmt: skip
"""Each has a module of its name."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def asked_verbs(argv: Sequence[str]) -> Sequence[str]:
    """The verb of a command line; all of them where it does not begin with one.

    To import them all takes longer than many of them run.
    """
    words = argv[1:] if argv[:1] == ["--debug"] else argv
    return words[:1] if words[:1] and words[0] in VERBS else VERBS


def build_parser(names: Sequence[str] = VERBS) -> argparse.ArgumentParser:
    """The parser with these verbs."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serve language models with separate prefill and decode workers.",
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    parser.add_argument("--debug", action="store_true", help="show a traceback when it fails")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name in names:
        importlib.import_module(f".{name.replace('-', '_')}", __package__).add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    prepare_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = build_parser(asked_verbs(argv)).parse_args(argv)
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
