"""Measure the logs: how fast they are read, what they cost the training, how soon they appear."""
