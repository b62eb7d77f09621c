"""Checks of a machine before a training runs on it, without Slurm and the command line."""
