"""The profile: what was measured on which kind of GPU."""
