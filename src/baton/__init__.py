"""Baton: a disaggregated serving cluster with separate prefill and decode pools."""

__version__ = "0.1.0"
DISTRIBUTION = "baton-serve"
"""What ``pip`` calls it; the distribution ``baton`` is another project's."""
