"""Find why a run failed, from what it printed: the causes as data, and how they are weighed."""
