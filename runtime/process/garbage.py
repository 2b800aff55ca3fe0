"""Garbage collection of a process: what stays to the end is not looked through again and again.

A main module calls ``gc.disable()`` before its imports, if it is the program that runs. The
imports make some 200,000 objects, all of which stay. Collections during the imports and at the
end of the process took a quarter of a worker's start. :func:`end_of_imports` turns collection on.
"""

from __future__ import annotations

import gc


def end_of_imports() -> None:
    """Turn collection on again, if the main module turned it off, for the objects to come."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Exclude all current objects, which live long, from garbage collection. Call after loading."""
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """As :func:`settle`, and let further collections be rare: each is a pause of all requests."""
    gc.set_threshold(50_000, 50, 100)
    settle()
