"""What becomes of measurements: fitted links, a cluster file, the entries of a profile."""
