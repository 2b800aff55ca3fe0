"""Load generator of ``baton bench``: requests on a schedule, their latencies, and a report.

``plan`` and ``statistics`` are pure; ``run`` keeps the time and sends requests over the
native protocol, ``http`` over HTTP.
"""
