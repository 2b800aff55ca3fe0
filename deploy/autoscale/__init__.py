"""How many workers each pool should have: a pure policy, and what it is fed."""
