"""Which lines of a log tell of an error, and of what kind."""
