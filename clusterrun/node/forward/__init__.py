"""Forward what ranks write in the spool to the run directory."""
