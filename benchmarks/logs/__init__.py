"""Measure the logs: reading them, what they cost the training, how soon they are seen."""
