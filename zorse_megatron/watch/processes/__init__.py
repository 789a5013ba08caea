"""What watchers and ranks do after the fork; none of it needs torch."""
