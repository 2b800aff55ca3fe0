"""Where ``baton`` starts: what Ctrl-C does is settled before half a second of imports."""

from __future__ import annotations

import os
import signal
import sys

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main() -> int:
    """Entry point; returns the exit code.

    Ctrl-C ends the process without a word while it loads and at its very end; in between it is
    the command's KeyboardInterrupt. Where it was ignored from the start, as in the background
    of a shell script, it stays so.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    try:
        from .command import main as command

        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command()
    except ModuleNotFoundError as problem:
        return _incomplete(problem)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        if heeded:
            signal.signal(signal.SIGINT, _leave)


def _incomplete(problem: ModuleNotFoundError) -> int:
    """Name the package that is not installed; a missing module of our own is our bug."""
    name = (problem.name or "").partition(".")[0]
    if name in ("", "baton"):
        raise problem
    package = {"zmq": "pyzmq"}.get(name, name)
    sys.stderr.write(f"baton: the Python package {package} is missing: pip install {package}\n")
    return EXIT_FAILED


def _leave(_number: int, _frame: object) -> None:
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
