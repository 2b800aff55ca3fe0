"""Simulates a cluster: the real cores of all processes on a simulated clock and network."""
