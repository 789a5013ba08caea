"""Data sets and samples: who reads which, in stock's order."""
