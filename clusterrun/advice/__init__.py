"""Collect what an estimate needs from this machine: the question, measurements."""
