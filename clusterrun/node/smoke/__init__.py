"""A smoke job's part on a node: check it alone, then all nodes together."""
