"""The cluster as a graph: shared links, routes over them, and where to partition it."""
