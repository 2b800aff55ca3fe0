"""The router process: admits requests, assigns them to workers, relays tokens."""
