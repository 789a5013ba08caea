"""Simulate plans: how long an iteration takes, and whether it fits."""
