"""Checks of a machine that have a file each: a decorated function and its page."""
