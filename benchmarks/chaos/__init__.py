"""Inject every fault into a training, and measure how long it takes to recover."""
