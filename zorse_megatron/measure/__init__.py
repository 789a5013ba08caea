"""Measures a real cluster: which devices there are, what joins them, how long layers take."""
