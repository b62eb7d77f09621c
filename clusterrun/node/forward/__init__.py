"""Forward what the ranks write to the spool into the run directory."""
