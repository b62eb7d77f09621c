"""The format of log lines, and the kinds of error lines."""
