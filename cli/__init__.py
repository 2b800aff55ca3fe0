"""The baton command."""
