"""``baton serve`` whose processes raise exceptions in their own code; only tests start it.

``python -m tests.cluster.faulty.serve`` takes the arguments of ``baton serve``, and starts each
child as ``python -m tests.cluster.faulty``, which plants the exceptions and runs the real program.
"""
