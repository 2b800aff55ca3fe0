"""The child processes of one host: start, restart, hangs, lack of memory, logs."""
