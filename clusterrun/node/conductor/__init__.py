"""The conductor: run a job from attempt to attempt."""
