"""Sampling of a token from logits, by counter-based random numbers."""
