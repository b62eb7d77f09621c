"""Measure how long `clusterrun plan` takes."""
