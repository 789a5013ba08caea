"""Measure a real cluster: its devices, its links, and layer times."""
