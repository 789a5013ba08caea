"""The plan file: what the planner and the runtime share."""
