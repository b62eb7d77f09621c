"""Stands for torchrun, which makes its loggers when it is imported."""
