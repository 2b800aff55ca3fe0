"""Timeouts between the two sides of a handoff."""

from __future__ import annotations

HANDOFF_TIMEOUT_S = 3.0
"""Seconds without an answer after which one side of a handoff treats the other as unreachable.

Shorter than the worker timeout: if only the link is broken, the request can move to another pair
of workers before any worker is declared dead. Longer than a normal pause of a busy process."""
ASK_EVERY_S = 0.5
"""Seconds between repeated pings to a peer whose answer is awaited; single pings may be lost."""
OWN_PAUSE_S = 1.0
"""If two clock readings are further apart (seconds), this process itself was paused.

Such a gap does not count towards a peer's timeout. Shorter gaps do count: a busy machine has them
all the time, and excusing all of them would never end a handoff.
"""
