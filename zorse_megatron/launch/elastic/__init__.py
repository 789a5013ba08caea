"""A job that goes on with the nodes that are left."""
