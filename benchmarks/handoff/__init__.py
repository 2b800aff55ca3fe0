"""A handoff between two processes, timed: ``python -m baton.benchmarks.handoff``."""
