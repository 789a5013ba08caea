"""Which ranks might hold the same layers: partitions of the topology graph."""
