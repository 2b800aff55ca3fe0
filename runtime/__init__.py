"""The process shell: configuration, logging, event loop, sockets, lifecycle."""
