"""Figures drawn from recorded runs and plans."""
