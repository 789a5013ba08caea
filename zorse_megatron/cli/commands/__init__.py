"""The commands of `zorse`, a file each."""
