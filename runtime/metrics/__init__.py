"""Metrics for Prometheus: families of numbers, their exposition, and a listener for scrapes."""
