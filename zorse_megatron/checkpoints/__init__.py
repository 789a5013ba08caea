"""Checkpoint directories: which are complete, and which one training resumes from."""
