"""The native client of the router socket."""
