"""What people and clusters say: cluster, model, profile, status of a run."""
