"""Measurements beside peers; never part of the tests."""
