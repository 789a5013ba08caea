"""To another plan between two steps, in the same processes: see docs/elastic.md."""
