"""CURVE keys: key folders, who is allowed, and which names and identities a key owns."""
