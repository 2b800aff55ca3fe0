"""The wire contract: contexts, sampling parameters, messages, codec, layouts and errors."""
