"""What the ranks of the checks run."""
