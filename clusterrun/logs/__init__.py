"""Read the log lines of a run."""
