"""Run jobs on this machine: each node is simulated by a process."""
