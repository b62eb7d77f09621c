"""Decide what will run: pure functions of a spec and of facts."""
