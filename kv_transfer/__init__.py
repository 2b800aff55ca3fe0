"""Moving KV blocks: sender and receiver state machines and their transports."""
