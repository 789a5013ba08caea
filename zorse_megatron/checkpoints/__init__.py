"""Checkpoint folders: which there are, which are whole, which one training goes on from."""
