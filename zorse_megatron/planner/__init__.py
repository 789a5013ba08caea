"""From a cluster, a model and a profile to the plan that trains it fastest. See docs/planner.md."""
