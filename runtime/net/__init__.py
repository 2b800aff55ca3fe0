"""Sockets, their event loop, and the batching of outgoing messages."""
