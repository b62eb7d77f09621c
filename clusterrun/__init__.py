"""clusterrun: one command takes a training script to N nodes and proves that they are one world."""

from __future__ import annotations

__version__ = "0.1.0"
