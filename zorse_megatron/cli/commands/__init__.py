"""The commands of `zorse`, a file for each group of them."""
