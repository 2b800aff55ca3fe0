"""Programs for maintainers, which no cluster needs."""
