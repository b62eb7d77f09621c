"""Read the log lines that a run left behind."""
