"""Prices the action lists that the runtime executes: time, memory, and why."""
