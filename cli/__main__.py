"""Entry point of ``baton``. Sets up Ctrl-C first, because the imports take half a second."""

from __future__ import annotations

import gc
import os
import signal
import sys

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main() -> int:
    """Run the command and return the exit code.

    During imports and at exit, Ctrl-C ends the process silently. In between, Ctrl-C raises
    KeyboardInterrupt in the command. If SIGINT was ignored from the start, as for a background
    job of a shell script, it stays ignored.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    gc.disable()
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
        gc.enable()  # if the arguments were wrong: no command has run
        if heeded:
            signal.signal(signal.SIGINT, _leave)


def _incomplete(problem: ModuleNotFoundError) -> int:
    """Report a missing package. Raise the error again if the module is Baton's: that is a bug."""
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
