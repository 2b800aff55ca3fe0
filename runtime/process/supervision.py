"""What a supervisor and the processes that it runs agree on, so that neither imports the other."""

from __future__ import annotations

import signal

TURN_SIGNAL = signal.SIGUSR1
"""The supervisor's order to change the role, after it has written the new settings."""
SIGN_OF_LIFE = "process.alive"
"""Log event of a supervised process, written once a second by a completed turn of its clock.

It shows the supervisor that the process works, even if its connections are lost. ``turns`` must
grow from one to the next: a process whose clock stands still is replaced."""
