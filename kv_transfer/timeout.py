"""How long the two sides of a handoff wait for each other."""

from __future__ import annotations

HANDOFF_TIMEOUT_S = 3.0
"""Seconds without an answer after which one side of a handoff gives the other up as unreachable.

Shorter than the worker timeout, for a request that waits here can go on by another pair of workers
while nobody is dead; longer than the pause of a busy or stopped process that soon goes on."""
ASK_EVERY_S = 0.5
"""How often a peer whose answer is awaited is asked again: several questions may be lost."""
OWN_PAUSE_S = 1.0
"""A longer gap between two looks at the clock was this process's own pause and does not count.

Shorter gaps count: on a busy machine they are the rule, and excusing them all would end no handoff.
"""
