"""Measure the way from a command to the first step, and back after a failure."""
