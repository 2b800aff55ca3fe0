"""All cores on a simulated clock and network."""
