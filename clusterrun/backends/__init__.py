"""Where jobs run: Slurm, or simulated nodes on this machine."""
