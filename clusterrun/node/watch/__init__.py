"""Watch the ranks: progress, hangs, interruptions, saves."""
