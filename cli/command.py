"""The ``baton`` command: parse arguments, run one command, report errors in one line.

Exit codes: 0 success; 1 failure; 2 wrong command line, setting or file, and nothing was done;
130 interrupted by Ctrl-C. For 1 and 2, one line on standard error gives the error and the remedy.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence

from baton import __version__
from baton.proto.errors import BatonError, ConfigError
from baton.runtime.process.garbage import end_of_imports

from .output import open_output, say, silence_output
from .parser import EXIT_USAGE, Parser, did_you_mean, warn

VERBS = (
    "serve", "launch", "gateway", "demo", "generate", "chat", "embed", "speak", "draw", "bench",
    "plan", "status", "top", "trace", "wait-ready", "scale", "drain", "role", "rollout", "down",
    "keygen", "ray-config", "ray-certs", "install", "doctor", "completion",
)  # fmt: skip
"""The commands. Each command has a module with the same name."""

_VARIABLES = frozenset({"BATON_ADDRESS", "BATON_KEYS", "BATON_ADMIN", "BATON_API_KEY"})
"""Variables that are not settings; an operator may export them in every shell."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def asked_verbs(argv: Sequence[str]) -> Sequence[str]:
    """Return the command of a command line, or all commands if its first word is not a command.

    Importing the modules of all commands takes longer than many commands run.
    """
    words = argv[1:] if argv[:1] == ["--debug"] else argv
    return words[:1] if words[:1] and words[0] in VERBS else VERBS


def build_parser(names: Sequence[str] = VERBS) -> Parser:
    """Make the parser for these commands."""
    parser = Parser(
        prog="baton",
        usage="%(prog)s [--debug] COMMAND ...",
        description="Serve language models with separate prefill and decode workers.",
        epilog="baton help COMMAND, or baton COMMAND --help, shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    parser.add_argument("--debug", action="store_true", help="show a traceback on failure")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog=parser.prog
    )
    for name in names:
        importlib.import_module(f".{name.replace('-', '_')}", __package__).add_parser(commands)
        commands.choices[name].set_defaults(parser=commands.choices[name])
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Exits with code 2 and one line if it is wrong."""
    argv = _with_help(argv)
    parser = build_parser(asked_verbs(argv))
    words = argv[1:] if argv[:1] == ["--debug"] else argv
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(EXIT_USAGE)
    if not words[0].startswith("-") and words[0] not in VERBS:
        parser.error(f"no command {words[0]!r}{did_you_mean(words[0], VERBS)}")
    parser.refuse_unknown(words[:1])
    arguments: argparse.Namespace
    arguments, unexpected = parser.parse_known_args(argv)
    if unexpected:
        arguments.parser.unexpected(unexpected)
    return arguments


def _with_help(argv: Sequence[str]) -> Sequence[str]:
    """Return ``help`` as ``--help``, and ``help COMMAND`` as ``COMMAND --help``."""
    at = int(argv[:1] == ["--debug"])
    if argv[at : at + 1] != ["help"]:
        return argv
    return [*argv[:at], *argv[at + 1 : at + 2], "--help", *argv[at + 2 :]]


def warn_of_variables(environment: Mapping[str, str]) -> None:
    """Print a warning for each ``BATON_`` variable that sets nothing."""
    if any(name.startswith("BATON_") and name not in _VARIABLES for name in environment):
        from .settings import unknown_variables  # the import takes as long as some commands run

        for warning in unknown_variables(environment):
            warn(warning)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    prepare_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = parse(argv)  # imports the command
    end_of_imports()
    warn_of_variables(os.environ)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # raises here, not at interpreter exit, on a full disk or closed pipe
        return code
    except BatonError as problem:
        if arguments.debug:
            raise
        say(f"baton: {problem}{_hint(problem)}", error=True)
        return EXIT_USAGE if isinstance(problem, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence_output()  # the reader, such as `head`, closed the pipe: no error
        return 0
    except OSError as problem:
        if arguments.debug:
            raise
        silence_output()
        say(f"baton: {problem.strerror or problem}{_place(problem)}", error=True)
        return EXIT_FAILED


def _hint(problem: BatonError) -> str:
    if problem.retry_after is None or "retry in" in str(problem):
        return ""
    return f" (try again in {problem.retry_after:.1f} s)"


def _place(problem: OSError) -> str:
    return "" if problem.filename is None else f": {problem.filename}"


def prepare_streams() -> None:
    """Open closed descriptors 0 to 2 on the null device, and make standard output whole.

    If a descriptor stayed closed, the first socket could get its number, and output would go
    there. A character that standard output cannot hold is an error. Input bytes that are not UTF-8
    become lone surrogates, which the tokenizer rejects with an error message.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `descriptor`
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123 -- open until exit
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    sys.stdout = open_output(sys.stdout)
