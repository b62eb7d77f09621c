"""The code that runs inside each rank, in the user's process."""
