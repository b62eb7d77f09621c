"""Run jobs on Slurm: sbatch, srun, scontrol, squeue and sacct."""
