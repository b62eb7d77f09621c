"""The format of log lines, and the classes of error lines."""
