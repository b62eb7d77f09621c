"""What the preflight adds to the start of a job."""
