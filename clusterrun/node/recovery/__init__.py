"""How an attempt ended, and what follows it."""
