"""The command `logs`."""
