"""Estimates of a training before it is queued: formulas, each with its source."""
