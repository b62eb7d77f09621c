"""One process on each node that imports what the ranks need, and forks the ranks."""
