"""Measure the speed, memory and cost that the docs promise."""
