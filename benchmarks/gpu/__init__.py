"""Checks and measurements on a GPU: ``make gpu-check`` and ``make gpu-bench``."""
