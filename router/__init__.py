"""The router process: admission, policy, request lifecycle."""
