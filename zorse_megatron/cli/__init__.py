"""The `zorse` command."""
