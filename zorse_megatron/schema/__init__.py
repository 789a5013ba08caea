"""The files that people and commands share: plan, cluster, profile and model, read strictly."""
