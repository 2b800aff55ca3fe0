"""Launching and supervising the processes of a cluster."""
