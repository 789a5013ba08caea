"""Jobs on a real Slurm of one machine."""
