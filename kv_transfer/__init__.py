"""KV transfer from prefill to decode workers: sender and receiver state machines, transports."""
