"""Costs the runtime's action lists: time, memory, and why."""
