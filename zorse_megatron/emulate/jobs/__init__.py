"""Emulated jobs: what is trained, and how their ranks are started. Without torch."""
