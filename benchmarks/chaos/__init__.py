"""Hurt a training in every way, and measure how long it takes to come back."""
