"""The status of a run: what its ranks take, as rank 0 last wrote it."""
