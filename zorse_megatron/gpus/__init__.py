"""Kinds of GPU: what their data sheets say, and the names that they go by."""
