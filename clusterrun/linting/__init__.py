"""Pitfalls of a distributed launch, found by reading the script; nothing of it is executed."""
