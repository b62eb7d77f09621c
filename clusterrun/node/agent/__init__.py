"""The node agent: one node's part of an attempt, until its last process has ended."""
