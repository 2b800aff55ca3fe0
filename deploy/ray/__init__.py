"""A cluster on Ray: one supervising actor per member, and one controller actor.

Ray is an extra. It is imported only in this folder, and only when needed.
"""
