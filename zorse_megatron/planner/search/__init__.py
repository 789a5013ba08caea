"""The search: candidates from groupings and device orders, simulated and improved."""
