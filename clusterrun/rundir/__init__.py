"""The run directory: its paths, records and files."""
