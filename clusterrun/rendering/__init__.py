"""Render the exact text of every file of a Plan."""
