"""JSON schemas as constraints on tokens, compiled in a process of their own."""
