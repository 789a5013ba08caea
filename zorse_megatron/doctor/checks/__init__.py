"""One module for each kind of check: a function from the workshop to its finding."""
