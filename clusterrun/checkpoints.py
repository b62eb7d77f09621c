"""Checkpoints on disk: which are complete, which is the newest, which may go."""

from __future__ import annotations
