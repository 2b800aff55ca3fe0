"""What the next step computes, and the loop that computes it."""
