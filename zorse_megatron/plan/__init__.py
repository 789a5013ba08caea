"""The plan file and its rules: what planner and runtime share."""
