"""The simulator against training runs that others published: docs/simulator.md describes both."""
