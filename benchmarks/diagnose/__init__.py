"""Measure how often `clusterrun diagnose` is right."""
