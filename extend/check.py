"""Load extensions as their processes will: ``python -m baton.extend.check FOLDER POINT=NAME ...``.

This is a separate process, because the import of a module runs its code, which may hang or end the
process. Exit code 0, or 1 with the error on one line of standard output.
"""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # never enabled again: the process ends soon

from baton.runtime.process.os_settings import end_with_parent

from .resolve import POINTS, ExtensionError, resolve


def main() -> int:
    """Entry point."""
    end_with_parent()
    folder, *named = sys.argv[1:]
    shown = sys.stdout
    sys.stdout = sys.stderr  # standard output is for the error alone
    try:
        for one in named:
            point, _, name = one.partition("=")
            resolve(POINTS[point], name, folder)
    except ExtensionError as error:
        shown.write(" ".join(str(error).split()) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
