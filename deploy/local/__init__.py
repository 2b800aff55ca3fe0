"""A cluster on this machine, in the foreground or in the background."""
