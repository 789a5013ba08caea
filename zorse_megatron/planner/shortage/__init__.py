"""Why nothing fits: the least memory that is missing, and what would fit."""
