"""The cluster as a graph: links that are shared, routes over them, and where to cut it."""
