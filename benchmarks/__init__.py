"""Measure what the documents promise: speed, memory and cost."""
