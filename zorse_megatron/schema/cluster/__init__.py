"""The cluster file: which GPUs there are, and what joins them."""
