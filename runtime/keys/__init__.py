"""CURVE keys: key folders, allowed keys, and which names and identities a key owns."""
